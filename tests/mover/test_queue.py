"""Who goes first, what goes together, what can be taken back."""

from __future__ import annotations

from kvd.block import BlockId, ChainHash, NamespaceDigest
from kvd.memory import HostBlock
from kvd.mover import Fill, Learn, Lookup, Rank, Spill
from kvd.mover.jobs import Job, JobState
from kvd.mover.queue import MAX_BATCH, JobQueue
from kvd.pool import FillTicket, SpillTicket
from kvd.tiers.base import TierKey

SPACE = NamespaceDigest(b"n" * 32)
COPIES = tuple(rank for rank in Rank if rank is not Rank.QUESTION)


def name(number: int) -> ChainHash:
    return ChainHash(number.to_bytes(32, "big"))


def ignore(_job: Job) -> None:
    pass


def fill(number: int, *, wanted: bool = False) -> Fill:
    ticket = FillTicket(0, BlockId(number), number, name(number))
    return Fill(ticket, TierKey(SPACE, ticket.hash), 0, HostBlock(memoryview(bytearray(8))), ignore, wanted=wanted)


def spill(number: int) -> Spill:
    ticket = SpillTicket(0, BlockId(number), number, name(number), SPACE, 0)
    return Spill(ticket, HostBlock(memoryview(bytes(8))), (None,), ignore)


def test_wanted_promotions_go_before_others_and_spills_come_last() -> None:
    queue = JobQueue(max_spillers=1)
    jobs = [spill(1), fill(2), fill(3, wanted=True), fill(4)]
    queue.put(jobs)
    assert queue.take(COPIES) == [jobs[2]]
    assert queue.take(COPIES) == [jobs[1], jobs[3]]
    assert queue.take(COPIES) == [jobs[0]]


def test_a_batch_is_of_one_kind_and_bounded() -> None:
    queue = JobQueue(max_spillers=1)
    learn = Learn(SPACE, (None,), ignore)
    questions = [Lookup([], ignore), Lookup([], ignore), learn, Lookup([], ignore)]
    queue.put(questions)
    assert queue.take([Rank.QUESTION]) == questions[:2]
    assert queue.take([Rank.QUESTION]) == [learn]
    queue.put([fill(number) for number in range(MAX_BATCH + 1)])
    batch = queue.take(COPIES)
    assert batch is not None
    assert len(batch) == MAX_BATCH


def test_spills_never_take_every_thread() -> None:
    queue = JobQueue(max_spillers=1)
    queue.put([spill(number) for number in range(2 * MAX_BATCH)])
    first = queue.take(COPIES)
    queue.put([fill(99)])
    second = queue.take(COPIES)
    assert first is not None
    assert second is not None
    assert isinstance(second[0], Fill)
    queue.done(first)
    third = queue.take(COPIES)
    assert third is not None
    assert isinstance(third[0], Spill)


def test_only_what_has_not_begun_can_be_taken_back() -> None:
    queue = JobQueue(max_spillers=1)
    first, second = fill(1), spill(2)
    queue.put([first, second])
    assert queue.take(COPIES) == [first]
    assert queue.cancel([first, second]) == [second]
    assert (first.state, second.state, second.cancelled) == (JobState.RUNNING, JobState.DONE, True)
    assert queue.cancel([second]) == [], "once"
    assert sum(queued for queued, _ in queue.counts().values()) == 0


def test_a_promotion_that_somebody_waits_for_now_is_moved_ahead_once() -> None:
    queue = JobQueue(max_spillers=1)
    early, late = fill(1), fill(2)
    queue.put([early, late])
    queue.hurry([late, late], Rank.WANTED_FILL)
    assert queue.take(COPIES) == [late]
    assert queue.take(COPIES) == [early]
    assert {rank: queued for rank, (queued, _) in queue.counts().items() if queued} == {}


def test_closing_gives_back_what_waited_and_ends_every_take() -> None:
    queue = JobQueue(max_spillers=1)
    jobs = [fill(1), spill(2)]
    queue.put(jobs)
    queue.hurry(jobs[:1], Rank.WANTED_FILL)
    assert set(queue.close()) == set(jobs)
    assert queue.take(COPIES) is None
    assert queue.close() == []
    late = fill(3)
    assert queue.put([late]) == [late]
    assert late.cancelled
