"""What this driver answers to wrong calls, beside what the tests' fake driver answers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

from gpu_checks import actions
from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, Verdict, expect
from kvd.errors import CudaError
from kvd.memory.device_segment import DeviceSegment


def check(bench: Bench) -> Iterator[Row]:
    """Every row must be an error; which one is only compared."""
    device, context = bench.device.uuid, bench.context
    peer = bench.peer()
    with bench.segment(4 * MIB) as (segment, export):
        inner = context.export(segment.address + 3 * MIB)
        yield expect("codes", "an inner address gives the handle of the base", inner == segment.handle)
        small = [context.allocate(4096), context.allocate(4096)]
        shared = context.export(small[0]) == context.export(small[1])
        yield _compare("two small allocations share a handle", str(int(shared)), "1")
        for address in small:
            context.free(address)

        yield error_row("open in the exporting process", _raw_open(bench, export.handle), "201")
        second, closed = peer.call(actions.open_twice, device, export.handle)
        yield _compare("a second open gives", second, "the same address")
        yield error_row("one close too many", closed, "1")
        yield error_row("open of 64 zero bytes", peer.call(actions.raw_open, device, bytes(64)), "1")
        yield error_row("open of 64 bytes of ones", peer.call(actions.raw_open, device, b"\xff" * 64), "1")
        for other in bench.driver.devices:
            if other.uuid != device:
                found = bench.peer().call(actions.raw_open, other.uuid, export.handle)
                yield _compare(f"open on {other.name}, 0 with peer access", found, "217")
    freed = DeviceSegment(context, 4 * MIB)
    handle = freed.handle
    freed.close()
    yield error_row("open of memory that was freed", peer.call(actions.raw_open, device, handle), "400")
    yield error_row("a thread without a context", _without_context(bench), "201")
    yield expect("codes", "kvd gives that thread one", _with_context(bench))
    ours, theirs = peer.call(actions.fork, device)
    yield expect("codes", "kvd in a forked child", ours == "CudaForked", ours)
    yield error_row("the driver in a forked child", theirs, "3")
    yield expect("codes", "the parent of that child goes on", peer.call(actions.cards).count(device) == 1)
    peer.kill()


def error_row(what: str, found: str, fake: str, kind: str = "codes") -> Row:
    """Wrong without an error; which error is only compared."""
    if found == "0":
        return Row(kind, what, Verdict.WRONG, "no error")
    return _compare(what, found, fake, kind)


def _compare(what: str, found: str, fake: str, kind: str = "codes") -> Row:
    if found == fake:
        return Row(kind, what, Verdict.RIGHT, found)
    return Row(kind, what, Verdict.DIFFERS, f"{found}, the fake says {fake}")


def _raw_open(bench: Bench, handle: bytes) -> str:
    try:
        bench.context.open_handle(handle)
    except CudaError as error:
        return str(error.result)
    return "0"


def _without_context(bench: Bench) -> str:
    found: list[int] = []

    def ask() -> None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        found.append(bench.driver.library.try_call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)))

    _in_thread(ask)
    return str(found[0])


def _with_context(bench: Bench) -> bool:
    found: list[int] = []
    _in_thread(lambda: found.append(bench.context.memory()[1]))
    return bool(found)


def _in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
