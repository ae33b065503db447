"""Copies on streams. Nothing is there before somebody waited for it, and no memory is reused before."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import pytest

from kvd.cuda import Context
from kvd.cuda.page_lock import PageLock, StagingMemory
from kvd.errors import CudaDeviceLost, CudaError, CudaMisuse
from kvd.memory.block_memory import DeviceBlock, HostBlock, carrying
from kvd.memory.device_copies import CopyEngine
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.segment import HostSegment
from kvd.memory.segment_locks import SegmentLocks
from tests.fakecuda.machine import MIB, FakeMachine

BLOCK = 64 << 10


@pytest.fixture
def segment(p40: Context) -> Iterator[DeviceSegment]:
    with DeviceSegment(p40, 4 * MIB) as segment:
        yield segment


@pytest.fixture
def engine(p40: Context) -> Iterator[CopyEngine]:
    engine = CopyEngine(p40, lane_nbytes=16 * BLOCK)
    yield engine
    engine.close()


def content(number: int) -> bytes:
    return bytes([number + 1]) * BLOCK


def fill(segment: DeviceSegment, num_blocks: int) -> None:
    for number in range(num_blocks):
        segment.write(number * BLOCK, bytearray(content(number)))


def test_several_blocks_are_in_flight_and_all_arrive(engine: CopyEngine, segment: DeviceSegment, machine: FakeMachine):
    fill(segment, 16)
    machine.forget_calls()
    with engine.lane() as lane:
        staged = [lane.download(segment, number * BLOCK, BLOCK) for number in range(16)]
        assert machine.num_calls("cuMemcpyDtoHAsync_v2") == 16
        assert machine.num_calls("cuStreamSynchronize") == 0
        assert not lane.room_for(BLOCK)
        lane.synchronize()
        assert [bytes(one.data) for one in staged] == [content(number) for number in range(16)]
        for number, one in enumerate(staged):
            lane.upload(segment, (32 + number) * BLOCK, one)
    target = bytearray(16 * BLOCK)
    segment.read(32 * BLOCK, target)
    assert target == b"".join(map(content, range(16)))


def test_bytes_read_before_the_wait_are_old(engine: CopyEngine, segment: DeviceSegment):
    fill(segment, 1)
    with engine.lane() as lane:
        staged = lane.download(segment, 0, BLOCK)
        assert bytes(staged.data) == bytes(BLOCK)
        lane.synchronize()
        assert bytes(staged.data) == content(0)


def test_bytes_changed_before_the_wait_are_the_ones_copied(engine: CopyEngine, segment: DeviceSegment):
    with engine.lane() as lane:
        staged = lane.stage(BLOCK)
        staged.data[:] = content(0)
        lane.upload(segment, 0, staged)
        staged.data[:] = content(1)
    target = bytearray(BLOCK)
    segment.read(0, target)
    assert target == content(1)


def test_at_the_end_of_a_lane_its_copies_are_done(engine: CopyEngine, segment: DeviceSegment):
    with engine.lane() as lane:
        staged = lane.stage(BLOCK)
        staged.data[:] = content(7)
        lane.upload(segment, 0, staged)
    target = bytearray(BLOCK)
    segment.read(0, target)
    assert target == content(7)


def test_a_batch_that_fails_waits_for_its_copies_before_the_memory_is_used_again(
    engine: CopyEngine, segment: DeviceSegment, machine: FakeMachine
):
    machine.forget_calls()

    def fail() -> None:
        with engine.lane() as lane:
            lane.download(segment, 0, BLOCK)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert machine.num_calls("cuStreamSynchronize") == 1


def test_a_lane_whose_wait_failed_is_waited_for_before_its_next_use(
    p40: Context, segment: DeviceSegment, machine: FakeMachine
):
    fill(segment, 1)
    engine = CopyEngine(p40, num_lanes=1, lane_nbytes=4 * BLOCK)
    machine.fail("cuStreamSynchronize:1=999")
    with pytest.raises(CudaError, match="UNKNOWN"), engine.lane() as lane:
        lane.download(segment, 0, BLOCK)
    with engine.lane() as lane:
        # The copy of before ran by now: it cannot come over what is staged next.
        staged = lane.stage(BLOCK)
        assert bytes(staged.data) == content(0)
        staged.data[:] = content(1)
        lane.synchronize()
        assert bytes(staged.data) == content(1)
    engine.close()


@pytest.mark.parametrize("down", [True, False])
def test_a_copy_whose_wait_failed_does_not_come_over_what_follows(
    p40: Context, engine: CopyEngine, segment: DeviceSegment, machine: FakeMachine, down: bool
):
    """Whoever was told of the failure gives the block to another."""
    own = mmap.mmap(-1, BLOCK)
    with PageLock(p40, own), memoryview(own) as view:
        segment.write(0, bytearray(content(1)))
        view[:] = content(2)
        machine.fail("cuStreamSynchronize:1=999")
        pairs = [(DeviceBlock(engine, segment, 0, BLOCK), HostBlock(view[:]))]
        with pytest.raises(CudaError, match="UNKNOWN"), carrying([pair if down else pair[::-1] for pair in pairs]):
            pass
        assert machine.fired() == ["cuStreamSynchronize:1=999"]
        back = bytearray(BLOCK)
        if down:
            view[:] = content(3)
        else:
            segment.write(0, bytearray(content(3)))
        with engine.lane(), engine.lane():
            pass
        segment.read(0, back)
        assert (bytes(view), back) == ((content(3), content(1)) if down else (content(2), content(3)))
        pairs[0][1].release()


def test_a_card_that_does_not_let_itself_be_waited_for_counts_as_lost(
    p40: Context, segment: DeviceSegment, machine: FakeMachine
):
    engine = CopyEngine(p40, num_lanes=1, lane_nbytes=4 * BLOCK)
    machine.fail("cuStreamSynchronize:*=999")
    with pytest.raises(CudaError, match="UNKNOWN"), engine.lane() as lane:
        lane.download(segment, 0, BLOCK)
    assert "cannot be waited for" in str(p40.lost)
    machine.fail("")
    with pytest.raises(CudaDeviceLost, match="cannot be waited for"), engine.lane():
        pass
    engine.close()


def test_more_than_a_lane_holds_is_refused(engine: CopyEngine, segment: DeviceSegment):
    with engine.lane() as lane:
        assert lane.room_for(BLOCK) == 16
        assert lane.room_for(BLOCK - 1) == 16
        with pytest.raises(CudaMisuse, match="no room"):
            lane.stage(17 * BLOCK)


def test_threads_wait_for_a_free_lane(p40: Context, segment: DeviceSegment):
    engine = CopyEngine(p40, num_lanes=1, lane_nbytes=BLOCK)
    entered, order = threading.Event(), []

    def second() -> None:
        entered.set()
        with engine.lane():
            order.append("second")

    thread = threading.Thread(target=second)
    with engine.lane():
        thread.start()
        assert entered.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    engine.close()


def test_many_threads_move_many_blocks(p40: Context, segment: DeviceSegment):
    engine = CopyEngine(p40, num_lanes=2, lane_nbytes=4 * BLOCK)
    wrong: list[int] = []

    def move(number: int) -> None:
        for _ in range(20):
            with engine.lane() as lane:
                staged = lane.stage(BLOCK)
                staged.data[:] = content(number)
                lane.upload(segment, number * BLOCK, staged)
            with engine.lane() as lane:
                back = lane.download(segment, number * BLOCK, BLOCK)
                lane.synchronize()
                if bytes(back.data) != content(number):
                    wrong.append(number)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    engine.close()


def test_memory_of_the_callers_own_is_copied_without_staging(p40: Context, engine: CopyEngine, segment: DeviceSegment):
    fill(segment, 1)
    own = mmap.mmap(-1, 2 * BLOCK)
    with PageLock(p40, own), engine.lane() as lane:
        lane.download_into(segment, 0, memoryview(own)[:BLOCK])
        assert own[:BLOCK] == bytes(BLOCK)
        lane.synchronize()
        assert own[:BLOCK] == content(0)
        own[BLOCK:] = content(5)
        lane.upload_from(segment, BLOCK, memoryview(own)[BLOCK:])
    target = bytearray(BLOCK)
    segment.read(BLOCK, target)
    assert target == content(5)


def test_a_large_range_is_locked_in_pieces_and_unlocked_whole(p40: Context, machine: FakeMachine):
    memory = mmap.mmap(-1, 10 * BLOCK)
    with PageLock(p40, memory, step_nbytes=4 * BLOCK):
        assert machine.num_calls("cuMemHostRegister_v2") == 3
        with pytest.raises(CudaMisuse, match="ALREADY_REGISTERED"):
            PageLock(p40, memoryview(memory)[9 * BLOCK :])
    PageLock(p40, memory).close()


def test_a_range_that_is_not_locked_whole_is_not_locked_at_all(p40: Context, machine: FakeMachine):
    memory = mmap.mmap(-1, 10 * BLOCK)
    machine.fail("cuMemHostRegister_v2:3=2")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        PageLock(p40, memory, step_nbytes=4 * BLOCK)
    assert machine.num_calls("cuMemHostUnregister") == 2


def test_what_the_driver_does_not_unlock_stays_mapped(p40: Context, machine: FakeMachine):
    refused, closed = mmap.mmap(-1, 10 * BLOCK), mmap.mmap(-1, BLOCK)
    machine.fail("cuMemHostRegister_v2:3=2,cuMemHostUnregister:1=999,cuMemHostUnregister:3=999")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        PageLock(p40, refused, step_nbytes=4 * BLOCK)
    PageLock(p40, closed).close()
    assert machine.fired()[1:] == ["cuMemHostUnregister:1=999", "cuMemHostUnregister:3=999"]
    for memory in (refused, closed):
        with pytest.raises(BufferError):
            memory.close()
    whole = mmap.mmap(-1, BLOCK)
    PageLock(p40, whole).close()
    whole.close()


def test_without_page_locking_copies_are_right_and_the_log_says_so(
    p40: Context, segment: DeviceSegment, machine: FakeMachine, caplog
):
    fill(segment, 2)
    machine.fail("cuMemHostRegister_v2:*=2")
    engine = CopyEngine(p40, lane_nbytes=4 * BLOCK)
    assert "cuMemHostRegister_v2" in str(engine.unlocked)
    assert "not page-locked" in caplog.text
    with engine.lane() as lane:
        staged = lane.download(segment, BLOCK, BLOCK)
        lane.synchronize()
        assert bytes(staged.data) == content(1)
    engine.close()


def test_staging_memory_stays_while_a_view_lives(p40: Context):
    staging = StagingMemory(p40, BLOCK)
    view = staging.view(0, BLOCK)
    staging.close()
    view[:] = content(1)
    with pytest.raises(CudaMisuse, match="closed"):
        staging.view(0, 1)


def test_a_lost_card_ends_every_batch_with_its_error_and_closes_quietly(
    p40: Context, segment: DeviceSegment, machine: FakeMachine
):
    engine = CopyEngine(p40, num_lanes=1, lane_nbytes=4 * BLOCK)
    machine.lose_card(0)
    for _ in range(3):
        with pytest.raises(CudaDeviceLost), engine.lane() as lane:
            lane.download(segment, 0, BLOCK)
    engine.close()


def test_host_segments_are_locked_until_they_or_the_card_go(machine: FakeMachine, p40: Context) -> None:
    locks = SegmentLocks(p40)
    machine.forget_calls()
    with HostSegment(MIB) as first, HostSegment(MIB) as second:
        locks.lock(first)
        locks.lock(second)
        assert machine.num_calls("cuMemHostRegister_v2") == 2
        first.close()
        assert machine.num_calls("cuMemHostUnregister") == 1
        locks.close()
        locks.close()
        assert machine.num_calls("cuMemHostUnregister") == 2
        second.close()
    assert machine.num_calls("cuMemHostUnregister") == 2


def test_a_host_segment_that_cannot_be_locked_serves_all_the_same(machine: FakeMachine, p40: Context) -> None:
    locks = SegmentLocks(p40)
    machine.fail("cuMemHostRegister_v2:*=999")
    with HostSegment(MIB) as segment:
        locks.lock(segment)
        segment.view(0, MIB)[:5] = b"hello"
    assert machine.fired() == ["cuMemHostRegister_v2:1=999"]
    machine.fail("")
    locks.close()
