"""The segments of device memory that the daemon has granted this session."""

from __future__ import annotations

from collections.abc import Callable

from kvd.cuda import DeviceExport, Driver
from kvd.errors import StateError
from kvd_client import device_imports
from kvd_client.device_imports import ImportedSegment, shared_driver


class DeviceSegmentTable:
    """(pool, segment) -> the opened segment. The table is one user of each; every storage over one is another.

    Under the session's guard; excludes nobody itself.
    """

    def __init__(self, epoch: int, open_driver: Callable[[], Driver] = shared_driver) -> None:
        self._epoch = epoch
        self._open_driver = open_driver
        self._segments: dict[tuple[int, int], ImportedSegment] = {}

    def granted(self, pool: int, segment: int, export: DeviceExport) -> ImportedSegment:
        """Opens it, some ten milliseconds. Raises `CudaImportRefused` (use the host pool beside it), `CudaError`.

        Raises `StateError` for a segment of another daemon than this session's.
        """
        if export.epoch != self._epoch:
            raise StateError(f"a device segment of epoch {export.epoch} was granted in epoch {self._epoch}")
        opened = device_imports.acquire(export, self._open_driver)
        previous = self._segments.pop((pool, segment), None)
        if previous is not None:
            device_imports.release(previous)
        self._segments[pool, segment] = opened
        return opened

    def revoked(self, pool: int, segment: int, when_closed: Callable[[], None]) -> None:
        """Lets go of it. Calls `when_closed` once nothing in this process maps it, now or when the last view dies.

        The daemon frees the memory only after every session has confirmed that. `when_closed` runs in whichever thread
        lets go last, and must be fit for that.
        """
        opened = self._segments.pop((pool, segment), None)
        if opened is None:
            when_closed()
            return
        opened.on_closed.append(when_closed)
        device_imports.release(opened)

    def find(self, pool: int, segment: int) -> ImportedSegment | None:
        """The opened segment; whoever builds views over it is a user of its own (`device_imports.share`)."""
        return self._segments.get((pool, segment))

    def close(self) -> None:
        """Lets go of all: the session is over, or the daemon's epoch is. Idempotent.

        A restarted daemon gets its memory back only when these mappings end, so they end with the last view.
        """
        while self._segments:
            device_imports.release(self._segments.popitem()[1])

    def __len__(self) -> int:
        return len(self._segments)
