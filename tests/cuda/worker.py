"""What `CudaProcess` runs: one JSON line a call, one a result. An owner of segments, an importer, or both."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec

from kvd.cuda import Context, DeviceExport, Driver, address_of, pid_namespace
from kvd.errors import KvdError
from kvd.memory import device_segment
from kvd_client.memory import device_imports
from kvd_client.memory.device_segments import DeviceSegmentTable

EPOCH = 7
_state: dict[str, Any] = {}


def _driver() -> Driver:
    return device_imports.shared_driver()


def _context() -> Context:
    if "context" not in _state:
        _state["context"] = _driver().open(_driver().devices[0])
    return _state["context"]


def _table() -> DeviceSegmentTable:
    return _state.setdefault("table", DeviceSegmentTable(EPOCH))


def cards() -> list[str]:
    return [device.uuid for device in _driver().devices]


def namespace() -> str:
    return pid_namespace()


def allocate(nbytes: int) -> dict[str, Any]:
    """A segment of our own; its export."""
    segment = device_segment.DeviceSegment(_context(), nbytes)
    _state.setdefault("owned", []).append(segment)
    return msgspec.to_builtins(segment.export(EPOCH))


def write(number: int, offset: int, text: str) -> None:
    _state["owned"][number].write(offset, bytearray(text.encode()))


def write_without_waiting(number: int, offset: int, text: str) -> None:
    """What a writer must not do: it tells of bytes that it did not wait for."""
    segment = _state["owned"][number]
    source = _state["source"] = bytearray(text.encode())
    stream = _state.setdefault("stream", _context().new_stream())
    stream.upload(segment.place(offset, len(source)), address_of(source), len(source))


def wait_for_the_stream() -> None:
    _state["stream"].synchronize()


def read(number: int, offset: int, nbytes: int) -> str:
    target = bytearray(nbytes)
    _state["owned"][number].read(offset, target)
    return target.hex()


def free(number: int) -> None:
    _state["owned"][number].close()


def grant(export: dict[str, Any], segment: int = 0) -> None:
    """It is opened too, as by a first use."""
    _table().granted(0, segment, msgspec.convert(export, DeviceExport))
    device_imports.release(_imported(segment))


def _imported(segment: int) -> Any:
    found = _table().acquire(0, segment)
    assert found is not None
    return found


def peek(segment: int, offset: int, nbytes: int) -> str:
    target = bytearray(nbytes)
    opened = _imported(segment)
    opened.context.download(address_of(target), opened.address + offset, nbytes)
    device_imports.release(opened)
    return target.hex()


def poke(segment: int, offset: int, text: str) -> None:
    source = bytearray(text.encode())
    opened = _imported(segment)
    opened.context.upload(opened.address + offset, address_of(source), len(source))
    device_imports.release(opened)


def revoke(segment: int) -> bool:
    """Whether it is closed already."""
    closed: list[bool] = []
    _table().revoked(0, segment, lambda: closed.append(True))
    return bool(closed)


def leave() -> None:
    """The end of the session, or of the daemon's epoch."""
    _table().close()


def open_twice(export: dict[str, Any]) -> bool:
    """Whether the driver gives the same address for the same handle."""
    handle = msgspec.convert(export, DeviceExport).handle
    first, second = _context().open_handle(handle), _context().open_handle(handle)
    _context().close_handle(second)
    target = bytearray(1)
    _context().download(address_of(target), first, 1)
    _context().close_handle(first)
    return first == second


def close_twice(export: dict[str, Any]) -> None:
    address = _context().open_handle(msgspec.convert(export, DeviceExport).handle)
    _context().close_handle(address)
    _context().close_handle(address)


def use_in_a_fork() -> str:
    """The name of the error that a forked child gets."""
    context, reader, writer = _context(), *os.pipe()
    child = os.fork()
    if not child:
        try:
            context.memory()
            said = "none"
        except KvdError as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 100).decode()


def leave_in_a_fork() -> str:
    """What a forked child finds open, before and after it closes its copy of the table, and what a new driver says."""
    before, (reader, writer) = device_imports.num_open(), os.pipe()
    child = os.fork()
    if not child:
        found = device_imports.num_open()
        _table().close()
        try:
            said = str(len(device_imports.shared_driver().devices))
        except KvdError as error:
            said = type(error).__name__
        text = f"had {before} open, the child {found} and then {device_imports.num_open()}; a driver there: {said}"
        os.write(writer, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 200).decode()


def main() -> None:
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            answer = {"result": globals()[verb](*arguments)}
        except KvdError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
