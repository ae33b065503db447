"""Segments of device memory that this process has opened: each once, however many sessions and sequences use it.

The registry is the process's own, since the driver maps an allocation once per process. A segment is closed when its
last user lets go; a mapping that is closed under a kernel that still runs ends every CUDA computation of the process.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.cuda import Context, DeviceExport, Driver, pid_namespace, unproven
from kvd.errors import CudaDeviceLost, CudaError, CudaImportRefused, CudaUnavailable

_log = logging.getLogger(__name__)


@functools.cache
def shared_driver() -> Driver:
    """The driver, started once in this process. Raises `CudaUnavailable`, and tries again at the next call then."""
    return Driver()


def refusal(
    device_uuid: str, exporters_namespace: str, open_driver: Callable[[], Driver] = shared_driver
) -> str | None:
    """Why this process cannot open memory of that card from that PID namespace, with what to do, or None when it can.

    What it says is known before the driver is asked to open anything, whose own answer would be an unrelated code.
    """
    ours = pid_namespace()
    if ours != exporters_namespace:
        return (
            f"device memory cannot be shared between PID namespaces (the daemon is in {exporters_namespace}, this "
            f"process in {ours or 'an unknown one'}): share the daemon's, with docker run --pid=host for instance"
        )
    try:
        driver = open_driver()
    except CudaUnavailable as error:
        return f"the daemon's memory is on {device_uuid}, and this process has no GPU: {error}"
    device = driver.find(device_uuid)
    if device is None:
        seen = ", ".join(map(str, driver.devices))
        return f"this process does not see {device_uuid}, only {seen}: add its UUID to CUDA_VISIBLE_DEVICES"
    return unproven(device)


@dataclass(eq=False)
class ImportedSegment:
    """One segment of the daemon's device memory at `address` of this process."""

    export: DeviceExport
    context: Context
    address: int
    host_address: int | None
    """Where the CPU can touch the same memory, if it can."""
    num_users: int = 1
    on_closed: list[Callable[[], None]] = field(default_factory=list)


class _Imports:
    """Every import of this process. The lock is held over an open or a close, some ten milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, bytes], ImportedSegment] = {}

    def acquire(self, export: DeviceExport, open_driver: Callable[[], Driver]) -> ImportedSegment:
        with self._lock:
            # The epoch too: a later daemon's handle may have the same bytes.
            found = self._opened.get((export.epoch, export.handle))
            if found is not None:
                found.num_users += 1
                return found
            opened = _open(export, open_driver)
            self._opened[export.epoch, export.handle] = opened
            return opened

    def share(self, segment: ImportedSegment) -> None:
        with self._lock:
            segment.num_users += 1

    def release(self, segment: ImportedSegment) -> None:
        with self._lock:
            segment.num_users -= 1
            # In a forked child the registry is empty: the segment is the parent's, which closes it.
            if segment.num_users or not self._opened.pop((segment.export.epoch, segment.export.handle), None):
                return
            _close(segment)
        for call in segment.on_closed:
            call()

    def __len__(self) -> int:
        return len(self._opened)


def _open(export: DeviceExport, open_driver: Callable[[], Driver]) -> ImportedSegment:
    reason = refusal(export.device, export.pid_namespace, open_driver)
    if reason is None and export.pid == os.getpid():
        reason = "the daemon runs in this very process, which has the memory already and cannot open it a second time"
    if reason is not None:
        raise CudaImportRefused(reason)
    driver = open_driver()
    device = driver.find(export.device)
    if device is None:
        raise CudaImportRefused(f"this process does not see {export.device}")
    context = driver.open(device)
    try:
        try:
            address = context.open_handle(export.handle)
        except CudaDeviceLost:
            raise
        except CudaError as error:
            raise CudaImportRefused(
                f"the driver does not open the daemon's memory on {device}: {error}",
                call=error.call,
                result=error.result,
            ) from error
        try:
            return ImportedSegment(export, context, address, context.host_address(address))
        except BaseException:
            context.close_handle(address)
            raise
    except BaseException:
        _close_context(context)
        raise


def _close(segment: ImportedSegment) -> None:
    try:
        segment.context.close_handle(segment.address)
    except CudaDeviceLost:
        # Nothing is mapped on a card that is gone.
        pass
    except CudaError as error:
        _log.error("device memory of the daemon stays mapped: %s", error)
    _close_context(segment.context)


def _close_context(context: Context) -> None:
    try:
        context.close()
    except CudaError as error:
        _log.error("a CUDA context was not released: %s", error)


_imports = _Imports()


def acquire(export: DeviceExport, open_driver: Callable[[], Driver] = shared_driver) -> ImportedSegment:
    """Opens the segment, or counts one more user of it. Raises `CudaImportRefused`, `CudaError`. `release` it."""
    return _imports.acquire(export, open_driver)


def share(segment: ImportedSegment) -> ImportedSegment:
    """One more user of a segment that is open; each of them releases it."""
    _imports.share(segment)
    return segment


def release(segment: ImportedSegment) -> None:
    """One user less; the last one closes it, and then calls `on_closed`. Never raises; failures are logged.

    Not for finalizers, since it may wait for the driver: those have the attendant call it.
    """
    _imports.release(segment)


def num_open() -> int:
    """How many segments this process has open."""
    return len(_imports)


def _in_child() -> None:
    # Nothing is closed: the driver does not live here, and what was opened is the parent's.
    global _imports  # noqa: PLW0603 - the registry is the process's, and this is another process
    _imports = _Imports()
    shared_driver.cache_clear()


os.register_at_fork(after_in_child=_in_child)
