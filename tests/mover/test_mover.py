"""Threads: every job comes back once, whatever happens to the tier or to the thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import xxhash

from kvd.block import BlockId, ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt, BlockMissing, TierUnavailable
from kvd.memory import HostBlock
from kvd.mover import Fill, Flush, Job, Learn, Lookup, Mover, Spill
from kvd.pool import FillTicket, SpillTicket
from kvd.tiers.base import Generation, TierKey
from kvd.tiers.stack import Stack
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier

SPACE = NamespaceDigest(b"n" * 32)
BLOCK = 4096
LIMIT_S = 30.0


def name(number: int) -> ChainHash:
    return ChainHash(number.to_bytes(32, "big"))


class Desk:
    """The loop's side: submits, waits for the wake-up, takes back."""

    def __init__(self) -> None:
        self.inner = DictTier()
        self.tier = FaultyTier(self.inner)
        self.woken = threading.Semaphore(0)
        self.mover = Mover(Stack([self.tier]), on_ready=self.woken.release)
        self.mover.start()
        self.finished: list[Job] = []

    def submit(self, *jobs: Job) -> None:
        self.mover.submit(jobs)

    def until(self, count: int) -> list[Job]:
        while len(self.finished) < count:
            assert self.woken.acquire(timeout=LIMIT_S), "the loop was not woken"
            for job in self.mover.take_done():
                job.finish()
        return self.finished

    def done(self, job: Job) -> None:
        self.finished.append(job)

    def spill(self, number: int, data: bytes | None = None, checksum: int = 0) -> Spill:
        ticket = SpillTicket(0, BlockId(number), number, name(number), SPACE, checksum)
        return Spill(ticket, HostBlock(memoryview(data or bytes([number]) * BLOCK)), (Generation(0),), self.done)

    def fill(self, number: int, into: bytearray, **more: bool) -> Fill:
        ticket = FillTicket(0, BlockId(number), number, name(number))
        return Fill(ticket, TierKey(SPACE, ticket.hash), 0, HostBlock(memoryview(into)), self.done, wanted=True, **more)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.tier.heal()
    desk.mover.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvd-mover")]


def test_a_block_goes_down_and_comes_up(desk: Desk) -> None:
    desk.submit(desk.spill(7))
    desk.until(1)
    lookup = Lookup([TierKey(SPACE, name(6)), TierKey(SPACE, name(7))], desk.done)
    into = bytearray(BLOCK)
    desk.submit(lookup, desk.fill(7, into))
    desk.until(3)
    assert lookup.places == [None, 0]
    assert into == bytes([7]) * BLOCK
    counters = desk.mover.status().counters
    assert (counters["spilled"], counters["promoted"], counters["blocks_found"]) == (1, 1, 1)
    assert counters["spilled_nbytes"] == counters["promoted_nbytes"] == BLOCK


def test_buffers_are_let_go_when_a_job_is_finished(desk: Desk) -> None:
    into = bytearray(BLOCK)
    desk.submit(desk.fill(1, into))
    desk.until(1)
    into.append(0)  # BufferError while anybody holds a view


def test_a_copy_that_fails_says_why(desk: Desk) -> None:
    job = desk.fill(1, bytearray(BLOCK))
    desk.submit(job)
    desk.until(1)
    assert isinstance(job.error, BlockMissing)


def test_a_spill_of_bytes_its_writer_did_not_seal_is_refused(desk: Desk) -> None:
    data = bytes(BLOCK)
    bad, good = desk.spill(1, data, checksum=1), desk.spill(2, data, xxhash.xxh3_64_intdigest(data))
    desk.submit(bad, good)
    desk.until(2)
    assert isinstance(bad.error, BlockCorrupt)
    assert good.error is None
    assert set(desk.inner.blocks) == {TierKey(SPACE, name(2))}


def test_after_a_drop_promotion_the_lower_copy_is_gone(desk: Desk) -> None:
    desk.submit(desk.spill(1), desk.spill(2))
    desk.until(2)
    desk.tier.fail_next("delete", TierUnavailable("gone"))
    kept = desk.fill(1, bytearray(BLOCK), drop_below=True)
    desk.submit(kept)
    desk.until(3)
    dropped = desk.fill(2, bytearray(BLOCK), drop_below=True)
    desk.submit(dropped)
    desk.until(4)
    assert (kept.kept_below, dropped.kept_below) == (True, False)
    assert set(desk.inner.blocks) == {TierKey(SPACE, name(1))}


def test_questions_are_answered_while_every_copy_hangs(desk: Desk) -> None:
    with desk.tier.hold("put") as put, desk.tier.hold("get") as get:
        desk.submit(desk.spill(1))
        put.wait_entered()
        desk.submit(desk.fill(2, bytearray(BLOCK)))
        get.wait_entered()
        learn = Learn(SPACE, (None,), desk.done)
        desk.submit(learn)
        assert desk.until(1) == [learn]
        assert learn.generations == (0,)
    desk.until(3)


def test_a_promotion_is_served_while_spills_hang(desk: Desk) -> None:
    desk.inner.blocks[TierKey(SPACE, name(9))] = bytes(BLOCK)
    with desk.tier.hold("put") as put:
        desk.submit(*[desk.spill(number) for number in range(1, 9)])
        put.wait_entered()
        desk.submit(*[desk.spill(number) for number in range(11, 19)])
        promoted = desk.fill(9, bytearray(BLOCK))
        desk.submit(promoted)
        assert desk.until(1) == [promoted]
    desk.until(17)


def test_a_cancelled_job_comes_back_at_once_and_does_nothing(desk: Desk) -> None:
    with desk.tier.hold("put") as put:
        running = [desk.spill(number) for number in range(1, 9)]
        desk.submit(*running)
        put.wait_entered()
        waiting = desk.spill(20)
        desk.submit(waiting)
        desk.mover.cancel([*running, waiting])
        assert desk.until(1) == [waiting]
        assert waiting.cancelled
        assert waiting.error is not None
    desk.until(9)
    assert TierKey(SPACE, name(20)) not in desk.inner.blocks
    assert all(job.error is None for job in running)


def test_a_thread_that_dies_is_replaced_and_its_jobs_come_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    before = [thread for thread in threading.enumerate() if thread.name.startswith("kvd-mover")]
    broken = desk.fill(1, bytearray(BLOCK))
    broken.place = "nonsense"  # type: ignore[assignment]  # a defect of kvd, as a thread would meet it
    desk.submit(broken)
    desk.until(1)
    assert broken.error is not None
    (dead,) = set(before) - {*desk.mover._threads.values()}
    dead.join(LIMIT_S)
    assert told[0].thread is dead
    desk.submit(desk.spill(1), desk.spill(2))
    desk.until(3)
    status = desk.mover.status()
    assert (status.num_thread_restarts, status.num_threads_alive) == (1, status.num_threads)


def test_a_flush_is_told_to_the_tiers(desk: Desk) -> None:
    desk.submit(desk.spill(1))
    desk.until(1)
    flush = Flush(SPACE, (None,), desk.done)
    desk.submit(flush)
    desk.until(2)
    assert flush.result.generations == (1,)
    assert not desk.inner.blocks


def test_a_flush_by_somebody_else_reaches_the_loop(desk: Desk) -> None:
    desk.inner.flushed_elsewhere(SPACE)
    desk.submit(Learn(SPACE, (None,), desk.done))
    desk.until(1)
    assert desk.mover.take_flushed() == [SPACE]


def test_closing_gives_back_every_job(desk: Desk) -> None:
    with desk.tier.hold("put") as put:
        jobs = [desk.spill(number) for number in range(1, 30)]
        desk.submit(*jobs)
        put.wait_entered()
        closer = threading.Thread(target=desk.mover.close)
        closer.start()
        put.release()
        closer.join(LIMIT_S)
    assert not closer.is_alive()
    assert {id(job) for job in desk.until(29)} == {id(job) for job in jobs}
