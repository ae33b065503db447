"""Segments of device memory that this process has opened: each once, however many sessions and sequences use it.

The registry is the process's own, since the driver maps an allocation once per process. A segment is closed when its
last user lets go; a mapping that is closed under a kernel that still runs ends every CUDA computation of the process.

A signal may raise between any two steps. So each use is an object, let go of when nobody holds it any more; and
the driver opens on a thread of its own, or what it had opened could be nobody's.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.cuda import Context, DeviceExport, Driver, pid_namespace, unproven
from kvd.errors import CudaDeviceLost, CudaError, CudaImportRefused, CudaUnavailable
from kvd_client.memory.attendant import attendant

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
class _Opened:
    """One segment of the daemon's device memory in this process."""

    export: DeviceExport
    context: Context
    address: int
    host_address: int | None
    users: set[object] = field(default_factory=set)
    """A token of each use."""
    on_closed: list[Callable[[], None]] = field(default_factory=list)


class ImportedSegment:
    """One use of a segment of the daemon's device memory. `release` it; one that is dropped is released, later."""

    opened: _Opened

    def __init__(self) -> None:
        self.token = object()
        self.finalizer = weakref.finalize(self, _dropped, self.token)
        self.finalizer.atexit = False

    @property
    def export(self) -> DeviceExport:
        """As the daemon granted it."""
        return self.opened.export

    @property
    def context(self) -> Context:
        """Of its card."""
        return self.opened.context

    @property
    def address(self) -> int:
        """Where it is in this process."""
        return self.opened.address

    @property
    def host_address(self) -> int | None:
        """Where the CPU can touch the same memory, if it can."""
        return self.opened.host_address

    def is_of(self, other: ImportedSegment) -> bool:
        """Whether both are uses of the same segment."""
        return self.opened is other.opened

    def when_closed(self, call: Callable[[], None]) -> None:
        """Calls once nothing in this process maps the segment any more."""
        self.opened.on_closed.append(call)


class _Imports:
    """Every import of this process. The lock is held over an open or a close, some ten milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, bytes], _Opened] = {}

    def acquire(self, export: DeviceExport, open_driver: Callable[[], Driver]) -> ImportedSegment:
        use = ImportedSegment()
        with self._lock:
            if self._find(use, export):
                return use
        failures: list[BaseException] = []

        def open_it() -> None:
            try:
                with self._lock:
                    if not self._find(use, export):
                        opened = _open(export, open_driver)
                        opened.users.add(use.token)
                        use.opened = self._opened[export.epoch, export.handle] = opened
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
                failures.append(error)

        # It holds the use until it is through: a caller who is interrupted drops one that is counted.
        thread = threading.Thread(target=open_it, name="kvd-device-open", daemon=True)
        thread.start()
        thread.join()
        if failures:
            raise failures.pop()
        return use

    def _find(self, use: ImportedSegment, export: DeviceExport) -> bool:
        # The epoch too: a later daemon's handle may have the same bytes.
        found = self._opened.get((export.epoch, export.handle))
        if found is None:
            return False
        use.opened = found
        found.users.add(use.token)
        return True

    def share(self, segment: ImportedSegment) -> ImportedSegment:
        use = ImportedSegment()
        use.opened = segment.opened
        with self._lock:
            use.opened.users.add(use.token)
        return use

    def release(self, segment: ImportedSegment) -> None:
        self._let_go(segment.opened, segment.token)
        segment.finalizer.detach()

    def release_dropped(self, token: object) -> None:
        from kvd_client.memory import device_order

        with self._lock:
            # Without any user is one whose last release was cut short.
            found = next((one for one in self._opened.values() if token in one.users or not one.users), None)
        if found is None:
            return
        if len(found.users) <= 1:
            # Whoever dropped it may have been about to wait.
            device_order.wait_for_device(found)
        self._let_go(found, token)

    def _let_go(self, opened: _Opened, token: object) -> None:
        with self._lock:
            opened.users.discard(token)
            # In a forked child the registry is empty: the segment is the parent's, which closes it.
            if opened.users or not self._opened.pop((opened.export.epoch, opened.export.handle), None):
                return
            _close(opened)
        for call in opened.on_closed:
            call()

    def __len__(self) -> int:
        return len(self._opened)


def _open(export: DeviceExport, open_driver: Callable[[], Driver]) -> _Opened:
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
            return _Opened(export, context, address, context.host_address(address))
        except BaseException:
            context.close_handle(address)
            raise
    except BaseException:
        _close_context(context)
        raise


def _close(segment: _Opened) -> None:
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
    """Opens the segment, or is one more use of it. Raises `CudaImportRefused`, `CudaError`. `release` it."""
    return _imports.acquire(export, open_driver)


def share(segment: ImportedSegment) -> ImportedSegment:
    """One more use of a segment that is open; each of them is released."""
    return _imports.share(segment)


def release(segment: ImportedSegment) -> None:
    """One use less; the last one closes it, and then calls who waited for that. Never raises; failures are logged.

    Not for finalizers, since it may wait for the driver: those have the attendant call it.
    """
    _imports.release(segment)


def _dropped(token: object) -> None:
    attendant().put(functools.partial(_release_dropped, token))


def _release_dropped(token: object) -> None:
    _imports.release_dropped(token)


def num_open() -> int:
    """How many segments this process has open."""
    return len(_imports)


def _in_child() -> None:
    # Nothing is closed: the driver does not live here, and what was opened is the parent's.
    global _imports  # noqa: PLW0603 - the registry is the process's, and this is another process
    _imports = _Imports()
    shared_driver.cache_clear()


os.register_at_fork(after_in_child=_in_child)
