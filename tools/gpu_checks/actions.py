"""What peers do: owner or client of device memory. State lives in the peer's process."""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from kvd.cuda import Context, DeviceExport, address_of
from kvd.errors import CudaError
from kvd.memory.device_segment import DeviceSegment
from kvd_client.memory import device_imports
from kvd_client.memory.device_imports import ImportedSegment

_opened: dict[bytes, ImportedSegment] = {}
_owned: list[DeviceSegment] = []
_contexts: list[Context] = []


def _context(device_uuid: str) -> Context:
    """Kept, so that opening a segment is not also making a context."""
    if not _contexts:
        driver = device_imports.shared_driver()
        device = driver.find(device_uuid)
        if device is None:
            raise CudaError(f"{device_uuid} is not visible")
        _contexts.append(driver.open(device))
    return _contexts[0]


def cards() -> list[str]:
    """UUIDs, by this process's numbers."""
    return [device.uuid for device in device_imports.shared_driver().devices]


def warm(device_uuid: str) -> None:
    """Makes this process's context on the card."""
    _context(device_uuid)


def attach(exports: list[DeviceExport]) -> float:
    """Opens segments; how long that took, in seconds."""
    _context(exports[0].device)
    began_s = time.perf_counter()
    for export in exports:
        _opened[export.handle] = device_imports.acquire(export)
    return time.perf_counter() - began_s


def detach() -> float:
    """Closes all of them; how long that took."""
    began_s = time.perf_counter()
    while _opened:
        device_imports.release(_opened.popitem()[1])
    return time.perf_counter() - began_s


def peek(export: DeviceExport, offset: int, nbytes: int) -> bytes:
    """Bytes of an attached segment."""
    opened, target = _opened[export.handle], bytearray(nbytes)
    opened.context.download(address_of(target), opened.address + offset, nbytes)
    return bytes(target)


def checksum(export: DeviceExport, offset: int, nbytes: int) -> int:
    """CRC-32 of bytes of an attached segment."""
    return zlib.crc32(peek(export, offset, nbytes))


def poke(export: DeviceExport, offset: int, data: bytes) -> None:
    """Writes into an attached segment."""
    opened, source = _opened[export.handle], bytearray(data)
    opened.context.upload(opened.address + offset, address_of(source), len(source))


def own(device_uuid: str, nbytes: int, data: bytes) -> DeviceExport:
    """A segment of the peer's own that begins with these bytes."""
    segment = DeviceSegment(_context(device_uuid), nbytes)
    segment.write(0, bytearray(data))
    _owned.append(segment)
    return segment.export(epoch=2)


def raw_open(device_uuid: str, handle: bytes) -> str:
    """What the driver answers to opening this handle, with none of kvd's own checks before."""
    context = _context(device_uuid)
    try:
        address = context.open_handle(handle)
    except CudaError as error:
        return f"{error.result}"
    context.close_handle(address)
    return "0"


def open_twice(device_uuid: str, handle: bytes) -> tuple[str, str]:
    """What a second open gives, and what the driver says to one close too many."""
    context = _context(device_uuid)
    first = context.open_handle(handle)
    try:
        second = context.open_handle(handle)
        said = "the same address" if second == first else "another address"
        context.close_handle(second)
    except CudaError as error:
        said = f"{error.result}"
    context.close_handle(first)
    try:
        context.close_handle(first)
    except CudaError as error:
        return said, f"{error.result}"
    return said, "0"


def fork(device_uuid: str) -> tuple[str, str]:
    """What kvd and what the driver itself say in a forked child."""
    context = _context(device_uuid)
    library = device_imports.shared_driver().library
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(10)
        try:
            context.memory()
            ours = "none"
        except CudaError as error:
            ours = type(error).__name__
        library._pid = os.getpid()
        os.write(writer, f"{ours} {library.try_call('cuInit', 0)}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as said:
        ours, _, theirs = said.read().partition(" ")
    return ours, theirs or "it hung"


def tensor(export: DeviceExport, offset: int, nbytes: int) -> dict[str, Any]:
    """A torch view of a part of an attached segment: where it is, and what it holds."""
    from kvd_client.memory.device_views import device_views

    opened = _opened[export.handle]
    views = device_views(opened, offset, nbytes)
    view = views.tensor("uint8")
    return {
        "device": str(view.device),
        "in_place": view.data_ptr() == opened.address + offset,
        "data": bytes(view.cpu().tolist()),
    }


def torch_facts() -> dict[str, Any] | None:
    """None when torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "sees": torch.cuda.is_available(),
        "archs": torch.cuda.get_arch_list() if torch.cuda.is_available() else [],
    }


def compute(export: DeviceExport, offset: int, nbytes: int) -> bytes:
    """Adds one to bytes of an attached segment with a kernel of torch's, and waits for it."""
    import torch

    from kvd_client.memory.device_views import device_views

    views = device_views(_opened[export.handle], offset, nbytes)
    view = views.tensor("uint8")
    view += 1
    if view.is_cuda:
        torch.cuda.synchronize(view.device)
    return bytes(view.cpu().tolist())


def forget_torch() -> None:
    """From now on this process has no torch."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def resources() -> int:
    """Open file descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))
