"""Each driver call of a whole life fails once: always a typed error or none, never memory or a context left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvd.cuda import Context, DeviceExport, address_of
from kvd.cuda.library import SIGNATURES
from kvd.errors import CudaError
from kvd.memory.device import choose_device
from kvd.memory.device_copies import CopyEngine
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.device_stock import DeviceStock
from kvd_client.memory import device_imports
from kvd_client.memory.device_imports import shared_driver
from tests.cuda.conftest import Start
from tests.cuda.process import CudaProcess
from tests.fakecuda.machine import MIB, FakeMachine
from tests.support.wait import eventually

BLOCK = 4096
UNKNOWN, OUT_OF_MEMORY, LOST = 999, 2, 719
LEFT_BY = {"cuMemFree_v2", "cuIpcCloseMemHandle", "cuDevicePrimaryCtxRelease"}
"""What these were to give back the driver has kept; whatever else fails, all comes back."""


def owner_life() -> None:
    choice = choose_device("cuda:0")
    assert choice.driver is not None
    assert choice.device is not None
    with choice.driver.open(choice.device) as context:
        stock = DeviceStock(context, segment_nbytes=2 * MIB, budget_nbytes=2 * MIB, reserve=0, prefault="lazy")
        try:
            stock.start()
            segment = stock.take()
            assert segment is not None
            try:
                use(context, segment)
            finally:
                stock.discard(segment)
                # On the stock's thread, so that every life makes the same calls.
                eventually(lambda: segment.closed)
        finally:
            stock.close()


def use(context: Context, segment: DeviceSegment) -> None:
    segment.write(0, bytearray(b"x" * BLOCK))
    context.copy(segment.place(BLOCK, BLOCK), segment.place(0, BLOCK), BLOCK)
    engine = CopyEngine(context, num_lanes=1, lane_nbytes=2 * BLOCK)
    try:
        with engine.lane() as lane:
            staged = lane.download(segment, BLOCK, BLOCK)
            lane.synchronize()
            lane.upload(segment, 2 * BLOCK, staged)
            lane.stream.copy(segment.place(3 * BLOCK, BLOCK), segment.place(2 * BLOCK, BLOCK), BLOCK)
    finally:
        engine.close()
    target = bytearray(BLOCK)
    segment.read(3 * BLOCK, target)
    assert target == b"x" * BLOCK


def importer_life(export: DeviceExport) -> None:
    opened = device_imports.acquire(export)
    try:
        target = bytearray(5)
        opened.context.download(address_of(target), opened.address, 5)
        assert target == b"hello"
    finally:
        device_imports.release(opened)


def error_of(life: Callable[[], None]) -> CudaError | None:
    try:
        life()
    except CudaError as error:
        return error
    return None


def each_call(machine: FakeMachine, life: Callable[[], None]) -> Iterator[tuple[str, int]]:
    """Every (function, number) of one life that goes well."""
    machine.forget_calls()
    life()
    for function in SIGNATURES:
        for number in range(1, machine.num_calls(function) + 1):
            yield function, number


@pytest.mark.parametrize("code", [UNKNOWN, OUT_OF_MEMORY, LOST])
def test_the_owner_survives_each_call_failing(machine: FakeMachine, code):
    calls = list(each_call(machine, owner_life))
    assert len(calls) > 60
    num_raised = 0
    for function, number in calls:
        machine.fail(f"{function}:{number}={code}")
        error = error_of(owner_life)
        num_raised += error is not None
        assert error is None or function in str(error) or code == LOST
        assert machine.fired() == [f"{function}:{number}={code}"]
        machine.fail("")
        release_what_is_left(machine, function)
        assert machine.held_nbytes() == 0, f"{function} number {number} left memory"
    assert num_raised > len(calls) / 2
    owner_life()


@pytest.mark.parametrize("code", [UNKNOWN, OUT_OF_MEMORY, LOST])
def test_a_client_survives_each_call_failing(machine: FakeMachine, start: Start, code):
    owner: CudaProcess = start()
    export = msgspec.convert(owner.allocate(2 * MIB), DeviceExport)
    owner.write(0, 0, "hello")

    def life() -> None:
        shared_driver.cache_clear()
        importer_life(export)

    calls = list(each_call(machine, life))
    assert len(calls) > 10
    for function, number in calls:
        machine.fail(f"{function}:{number}={code}")
        error = error_of(life)
        assert error is None or function in str(error) or code == LOST
        assert machine.fired() == [f"{function}:{number}={code}"]
        machine.fail("")
        assert device_imports.num_open() == 0
        release_what_is_left(machine, function)
    life()
    owner.kill()
    assert machine.held_nbytes() == 0


def release_what_is_left(machine: FakeMachine, function: str) -> None:
    """Ends this process's use of its cards, as its exit would; says whether anything but the failed call left one."""
    assert (machine.end_of_process() == 0) or function in LEFT_BY | {"cuCtxSetCurrent", "cuCtxGetCurrent"}
