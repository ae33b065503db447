"""Host pools beside a card: their segments, page-locked."""

from __future__ import annotations

import logging
import threading

from kvd.cuda import Context, address_of
from kvd.cuda.page_lock import PageLock, keep_mapped
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
        self._locks: dict[int, tuple[PageLock, memoryview]] = {}
        self._told = False

    def lock(self, segment: HostSegment) -> None:
        """Maps the segment and locks it. Never raises: copies then take longer, and the log says so once."""
        view = segment.view(0, segment.nbytes)
        try:
            lock = PageLock(self._context, address_of(view), segment.nbytes)
        except CudaError as error:
            view.release()
            if not self._told:
                _log.warning("host pools beside the card are not page-locked, copies take longer: %s", error)
            self._told = True
            return
        with self._excluding:
            self._locks[id(segment)] = lock, view
        segment.before_unmap = lambda: self._unlock(id(segment))

    def close(self) -> None:
        """Unlocks all there are. Never raises; idempotent."""
        for key in list(self._locks):
            self._unlock(key)

    def _unlock(self, key: int) -> None:
        with self._excluding:
            lock, view = self._locks.pop(key, (None, None))
        if lock is None or view is None:
            return
        if lock.close():
            view.release()
        else:
            keep_mapped(view)  # the mapping stays with it
