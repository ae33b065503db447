"""The segments of device memory that the daemon has granted this session, and where in them a block lies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.block import BlockId
from kvd.cuda import DeviceExport, Driver
from kvd.errors import CudaDeviceLost, StateError
from kvd_client.memory import device_imports
from kvd_client.memory.block_runs import split_runs
from kvd_client.memory.device_imports import ImportedSegment, shared_driver


class DeviceSegmentTable:
    """(pool, segment) -> what was granted, and the segment once it is open: at the first use, as that takes a while.

    The table is one user of each open segment; every storage over one is another. Safe to use from several threads,
    but not from finalizers.
    """

    def __init__(self, epoch: int, open_driver: Callable[[], Driver] = shared_driver) -> None:
        self._epoch = epoch
        self._open_driver = open_driver
        self._lock = threading.Lock()
        """Never held while a driver works."""
        self._granted: dict[tuple[int, int], DeviceExport] = {}
        self._open: dict[tuple[int, int], ImportedSegment] = {}

    def granted(self, pool: int, segment: int, export: DeviceExport) -> None:
        """Takes note of it. Raises `StateError` for a segment of another daemon than this session's."""
        if export.epoch != self._epoch:
            raise StateError(f"a device segment of epoch {export.epoch} was granted in epoch {self._epoch}")
        with self._lock:
            self._granted[pool, segment] = export

    def acquire(self, pool: int, segment: int) -> ImportedSegment | None:
        """The segment, opened now unless it is open already; the caller is one more user of it and releases it.

        None where it is not granted (any more). Raises `CudaImportRefused` (use the host pool beside it),
        `CudaDeviceLost`, `CudaError`.
        """
        key = (pool, segment)
        with self._lock:
            export, opened = self._granted.get(key), self._open.get(key)
            if opened is not None:
                if opened.context.lost is not None:
                    raise CudaDeviceLost(opened.context.lost)
                return device_imports.share(opened)
        if export is None:
            return None
        opened = device_imports.acquire(export, self._open_driver)
        with self._lock:
            if key not in self._granted:
                is_ours = False
            else:
                is_ours = True
                if key not in self._open:
                    self._open[key] = device_imports.share(opened)
        if is_ours:
            return opened
        # The session ended while the driver was at work.
        device_imports.release(opened)
        return None

    def revoked(self, pool: int, segment: int, when_closed: Callable[[], None]) -> None:
        """Lets go of it. Calls `when_closed` once nothing in this process maps it, now or when the last view dies.

        The daemon frees the memory only after every session has confirmed that. `when_closed` runs in whichever thread
        lets go last. What was never opened is confirmed at once.
        """
        with self._lock:
            self._granted.pop((pool, segment), None)
            opened = self._open.pop((pool, segment), None)
        if opened is None:
            when_closed()
            return
        opened.when_closed(when_closed)
        device_imports.release(opened)

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Whether (pool, segment) is granted."""
        return key in self._granted

    @property
    def has_any(self) -> bool:
        """Whether anything is granted or open."""
        return bool(self._granted or self._open)

    def close(self) -> None:
        """Lets go of all: the session is over, or the daemon's epoch is. Idempotent.

        A restarted daemon gets its memory back only when these mappings end, so they end with the last view.
        """
        with self._lock:
            self._granted.clear()
            opened, self._open = list(self._open.values()), {}
        for segment in opened:
            device_imports.release(segment)

    def forget_in_child(self) -> None:
        """In a forked child: what is open is the parent's."""
        self._lock = threading.Lock()
        self._granted.clear()
        self._open.clear()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """Blocks that are neighbours in a segment and in a sequence: one view."""

    first: int
    """Place of the first block among those asked about."""
    num_blocks: int
    segment: ImportedSegment
    """Whoever was given the run is a user of it, and releases it."""
    offset: int
    """In the segment, in bytes."""


class DevicePoolMemory:
    """Where a pool's blocks on a card lie. `acquire(pool, segment)` waits for a grant that is under way, and opens.

    Raises what `DeviceSegmentTable.acquire` raises.
    """

    def __init__(
        self,
        device: str,
        pool: int,
        block_nbytes: int,
        blocks_per_segment: int,
        acquire: Callable[[int, int], ImportedSegment],
    ) -> None:
        self.device = device
        self.pool = pool
        self.block_nbytes = block_nbytes
        self.blocks_per_segment = blocks_per_segment
        self._acquire = acquire

    def await_grants(self, blocks: Sequence[BlockId], *, writable: bool) -> None:
        """Returns when every segment of `blocks` is open: so that nobody waits for one while holding the guard.

        `writable` means nothing here: device memory is writable by whoever maps it.
        """
        for segment in {block // self.blocks_per_segment for block in blocks}:
            device_imports.release(self._acquire(self.pool, segment))

    def runs(self, blocks: Sequence[BlockId]) -> list[DeviceRun]:
        """The blocks as runs, in their order, each with a user of its segment that is the caller's to release."""
        runs: list[DeviceRun] = []
        try:
            for first, num_blocks in split_runs(blocks, self.blocks_per_segment):
                segment, index = divmod(blocks[first], self.blocks_per_segment)
                opened = self._acquire(self.pool, segment)
                runs.append(DeviceRun(first, num_blocks, opened, index * self.block_nbytes))
        except BaseException:
            for run in runs:
                device_imports.release(run.segment)
            raise
        return runs
