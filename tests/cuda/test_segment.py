"""Device segments in the process that owns them."""

from __future__ import annotations

import pytest

from kvd.cuda import Context
from kvd.errors import CudaError, CudaMisuse, CudaOutOfMemory, InvalidLayout
from kvd.memory.device_segment import DeviceSegment
from tests.fakecuda.machine import MIB, FakeMachine


def test_bytes_written_are_read_and_the_rest_is_zero(p40: Context):
    with DeviceSegment(p40, 4 * MIB) as segment:
        segment.write(3 * MIB, bytearray(b"hello"))
        target = bytearray(9)
        segment.read(3 * MIB - 2, target)
        assert target == b"\0\0hello\0\0"
    assert segment.closed


def test_what_another_tenant_left_is_gone(p40: Context, machine: FakeMachine):
    with DeviceSegment(p40, 2 * MIB) as first:
        first.write(0, bytearray(b"secret"))
    target = bytearray(6)
    with DeviceSegment(p40, 2 * MIB) as second:
        second.read(0, target)
    assert target == bytes(6)


@pytest.mark.parametrize("nbytes", [0, -2 * MIB, MIB, 3 * MIB, 2 * MIB + 4096])
def test_a_size_that_is_not_whole_granules_is_refused(p40: Context, machine: FakeMachine, nbytes):
    with pytest.raises(InvalidLayout, match="2 MiB"):
        DeviceSegment(p40, nbytes)
    assert machine.num_calls("cuMemAlloc_v2") == 0


def test_small_allocations_share_a_handle_which_is_why_segments_are_never_small(p40: Context):
    first, second = p40.allocate(4096), p40.allocate(4096)
    assert first != second
    assert p40.export(first) == p40.export(second)


def test_any_address_in_an_allocation_gives_the_handle_of_its_base(p40: Context):
    with DeviceSegment(p40, 4 * MIB) as segment:
        assert p40.export(segment.address + 3 * MIB) == segment.handle


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 2 * MIB + 1), (2 * MIB, 1), (0, -1)])
def test_a_part_outside_the_segment_is_refused(p40: Context, offset, nbytes):
    with DeviceSegment(p40, 2 * MIB) as segment, pytest.raises(CudaMisuse, match="not within"):
        segment.place(offset, nbytes)


def test_use_after_close_is_refused(p40: Context):
    segment = DeviceSegment(p40, 2 * MIB)
    segment.close()
    segment.close()
    with pytest.raises(CudaMisuse, match="closed"):
        segment.read(0, bytearray(1))


def test_more_than_the_card_has_is_a_clean_error(p40: Context, machine: FakeMachine):
    with DeviceSegment(p40, 60 * MIB):
        with pytest.raises(CudaOutOfMemory):
            DeviceSegment(p40, 6 * MIB)
        assert machine.held_nbytes() == 60 * MIB
    assert p40.memory() == (64 * MIB, 64 * MIB)


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuStreamSynchronize", "cuIpcGetMemHandle"])
def test_a_segment_that_cannot_be_made_leaves_nothing(p40: Context, machine: FakeMachine, call):
    machine.fail(f"{call}:1=999")
    with pytest.raises(CudaError, match=call):
        DeviceSegment(p40, 2 * MIB)
    assert machine.held_nbytes() == 0


def test_memory_the_driver_does_not_take_back_is_told_and_raises_nothing(p40: Context, machine: FakeMachine, caplog):
    segment = DeviceSegment(p40, 2 * MIB)
    machine.fail("cuMemFree_v2:1=999")
    segment.close()
    assert "was not given back: cuMemFree_v2: CUDA_ERROR_UNKNOWN" in caplog.text
