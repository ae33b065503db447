"""Host memory that the card copies from and to by itself."""

from __future__ import annotations

import logging
import mmap
from types import TracebackType
from typing import Self

from kvd.cuda.buffers import address_of
from kvd.cuda.context import Context
from kvd.errors import CudaDeviceLost, CudaError, CudaMisuse

LOCK_STEP_NBYTES = 1 << 30
"""The driver holds locks of the whole machine while it pins: never for more than this in one call."""
_log = logging.getLogger(__name__)
_still_locked: list[memoryview] = []
"""What the driver did not unlock: a copy may still come, so it stays mapped until the end of the process."""


class PageLock:
    """Page-locked memory of this process, in pieces. It stays mapped until it is unlocked: `close()`, idempotent."""

    def __init__(self, context: Context, memory: mmap.mmap | memoryview, step_nbytes: int = LOCK_STEP_NBYTES) -> None:
        """Takes about 0.1 s a GiB, with the GIL released. Raises `CudaError`; nothing is locked then, as far as the
        driver goes along.
        """
        self._context = context
        self._memory: memoryview | None = memoryview(memory)
        self._pieces: list[int] = []
        address, nbytes = address_of(self._memory), self._memory.nbytes
        try:
            for offset in range(0, nbytes, step_nbytes):
                context.register(address + offset, min(step_nbytes, nbytes - offset))
                self._pieces.append(address + offset)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Waits for copies that use it. Never raises: what the driver does not unlock is logged, and stays mapped."""
        memory, self._memory = self._memory, None
        unlocked = True
        while self._pieces:
            piece = self._pieces.pop()
            if self._context.closed:
                continue
            try:
                self._context.unregister(piece)
            except CudaDeviceLost:
                # Nothing copies on a card that is gone.
                continue
            except CudaError as error:
                unlocked = False
                _log.error("host memory stays page-locked: %s", error)
        if memory is not None:
            if unlocked:
                memory.release()
            else:
                _still_locked.append(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StagingMemory:
    """Host memory of our own for copies: page-locked where the driver allows it, else plain; `unlocked` says why."""

    def __init__(self, context: Context, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mmap.mmap(-1, nbytes)
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self.address = address_of(self._mapping)
        self.unlocked: str | None = None
        self._lock: PageLock | None = None
        try:
            self._lock = PageLock(context, self._mapping)
        except CudaDeviceLost:
            raise
        except CudaError as error:
            self.unlocked = str(error)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A part of it, writable. Raises `CudaMisuse` once it is closed."""
        if self._mapping is None:
            raise CudaMisuse("the staging memory was closed")
        return memoryview(self._mapping)[offset : offset + nbytes]

    def close(self) -> None:
        """Unlocks it; it is unmapped with the last view. Idempotent."""
        self._mapping = None
        if self._lock is not None:
            self._lock.close()
