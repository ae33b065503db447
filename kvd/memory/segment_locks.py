"""Host pools beside a card: their segments, page-locked."""

from __future__ import annotations

import logging
import threading

from kvd.cuda import Context
from kvd.cuda.page_lock import PageLock
from kvd.errors import CudaError
from kvd.memory.segment import HostSegment

_log = logging.getLogger(__name__)


class SegmentLocks:
    """Host segments that are page-locked for one card, so that blocks are copied straight between them and the card.

    Used from any thread. All of it is undone before the context goes.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._excluding = threading.Lock()
        self._locks: dict[int, PageLock] = {}
        self._told = False

    def lock(self, segment: HostSegment) -> None:
        """Maps the segment and locks it. Where that is refused copies take longer, and the log says so once.

        Raises `OSError` when it cannot be mapped.
        """
        try:
            with segment.view(0, segment.nbytes) as view:
                lock = PageLock(self._context, view)
        except CudaError as error:
            if not self._told:
                _log.warning("host pools beside the card are not page-locked, copies take longer: %s", error)
            self._told = True
            return
        with self._excluding:
            self._locks[id(segment)] = lock
        segment.before_unmap = lambda: self._unlock(id(segment))

    def close(self) -> None:
        """Unlocks all there are. Never raises; idempotent."""
        for key in list(self._locks):
            self._unlock(key)

    def _unlock(self, key: int) -> None:
        with self._excluding:
            lock = self._locks.pop(key, None)
        if lock is not None:
            lock.close()
