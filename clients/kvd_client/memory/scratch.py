"""Memory of this process that copies between host memory and a card go through: page-locked, so that the card copies by
itself, where its driver allows that.

Not the daemon's segments themselves: what is page-locked stays in memory, and a segment's memory must go the moment the
daemon takes it back, however idle its clients are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator

from kvd.cuda import Context, Driver
from kvd.cuda.page_lock import StagingMemory
from kvd.errors import CudaError, CudaUnavailable
from kvd_client.memory.device_imports import shared_driver

SCRATCH_NBYTES = 8 << 20
_log = logging.getLogger(__name__)


class CardScratch:
    """What copies to and from one card go through, one at a time; page-locked once, until `close`."""

    def __init__(self, device_uuid: str, open_driver: Callable[[], Driver] = shared_driver) -> None:
        """Page-locks nothing yet."""
        self._device_uuid = device_uuid
        self._open_driver = open_driver
        self._excluding = threading.Lock()
        self._context: Context | None = None
        self._memory: StagingMemory | None = None
        self._is_refused = False

    @contextlib.contextmanager
    def lent(self, nbytes: int) -> Iterator[memoryview]:
        """So much of it, to whoever asks first. Where the driver refuses, plain memory, and the log says so once."""
        with self._excluding:
            if not self._is_refused and (self._memory is None or self._memory.nbytes < nbytes):
                self._make(max(nbytes, SCRATCH_NBYTES))
            yield memoryview(bytearray(nbytes)) if self._memory is None else self._memory.view(0, nbytes)

    def _make(self, nbytes: int) -> None:
        self._drop()
        try:
            if self._context is None:
                self._context = self._open_context()
            memory = StagingMemory(self._context, nbytes)
        except CudaError as error:
            self._refused(str(error))
        else:
            if memory.unlocked is None:
                self._memory = memory
            else:
                self._refused(memory.unlocked)

    def _open_context(self) -> Context:
        """The one that torch has too."""
        driver = self._open_driver()
        device = driver.find(self._device_uuid)
        if device is None:
            raise CudaUnavailable(f"this process does not see {self._device_uuid}")
        return driver.open(device)

    def _refused(self, reason: str) -> None:
        self._is_refused = True
        _log.warning("kvd: copies to %s are not page-locked and take longer: %s", self._device_uuid, reason)

    def _drop(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def close(self) -> None:
        """Unlocks it, then lets go of it, and of the context. Idempotent; whoever asks again gets it anew."""
        with self._excluding:
            self._drop()
            context, self._context = self._context, None
            if context is not None:
                context.close()


@functools.cache
def scratch_of(device_uuid: str) -> CardScratch:
    """This process's own for a card."""
    return CardScratch(device_uuid)


# A forked child has no driver and no page-locked memory.
os.register_at_fork(after_in_child=scratch_of.cache_clear)
