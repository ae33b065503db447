"""Promotions and spills in every order of completions."""

from __future__ import annotations

import pytest

from kvd.block import BlockId
from kvd.errors import StateError
from kvd.pool import FillTicket, Grow, SpillTicket, WaitFor
from tests.pool.tiny import ALICE, BOB, CAROL, Tiny, h, ids


def fill(tiny: Tiny, name: str) -> FillTicket:
    ticket = tiny.pool.begin_fill(tiny.namespace, h(name))
    assert isinstance(ticket, FillTicket)
    tiny.check()
    return ticket


def complete(tiny: Tiny, ticket: FillTicket | SpillTicket, ok: bool = True) -> None:
    if isinstance(ticket, FillTicket):
        tiny.pool.complete_fill(ticket, ok)
    else:
        tiny.pool.complete_spill(ticket, ok)
    tiny.check()


# case C2
def test_those_who_want_a_block_wait_for_its_one_promotion() -> None:
    tiny = Tiny(4)
    ticket = fill(tiny, "a")
    assert tiny.pool.begin_fill(tiny.namespace, h("a")) is None
    assert tiny.pool.match([h("a")]) == 0
    assert tiny.ask(ALICE, "a", may_wait=True) == WaitFor(h("a"))
    assert tiny.ask(BOB, "a", may_wait=True) == WaitFor(h("a"))
    complete(tiny, ticket)
    assert tiny.pools.take_woken() == [(0, h("a"))]
    assert tiny.begin(ALICE, "a").blocks == tiny.begin(BOB, "a").blocks == ids(0)
    assert tiny.pool.begin_fill(tiny.namespace, h("a")) is None


def test_a_failed_promotion_frees_its_block_and_wakes() -> None:
    tiny = Tiny(4)
    ticket = fill(tiny, "a")
    assert tiny.ask(ALICE, "a", may_wait=True) == WaitFor(h("a"))
    complete(tiny, ticket, ok=False)
    assert tiny.pools.take_woken() == [(0, h("a"))]
    assert tiny.states == (4, 0, 0, 0)
    assert tiny.status.counters["failed_fills"] == 1


# case B11
def test_a_second_completion_does_nothing() -> None:
    tiny = Tiny(1)
    ticket = fill(tiny, "a")
    complete(tiny, ticket, ok=False)
    again = fill(tiny, "b")  # the same block, another generation
    assert again.block == ticket.block
    complete(tiny, ticket)
    assert tiny.states == (0, 0, 1, 0)
    complete(tiny, again)
    complete(tiny, again, ok=False)
    complete(tiny, ticket, ok=False)
    assert tiny.resident("a b") == "b"


# case B11
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("ends_first", [True, False])
def test_a_waiter_that_ends_while_its_promotion_runs_leaves_nothing_behind(ok: bool, ends_first: bool) -> None:
    tiny = Tiny(2)
    ticket = fill(tiny, "a")
    assert tiny.ask(ALICE, "a b", may_wait=True) == WaitFor(h("a"))
    if ends_first:
        tiny.pools.end_session(ALICE)
        complete(tiny, ticket, ok)
    else:
        complete(tiny, ticket, ok)
        tiny.pools.end_session(ALICE)
    tiny.check()
    assert tiny.states == ((1, 0, 0, 1) if ok else (2, 0, 0, 0))
    assert sorted(tiny.reserve(BOB, 2)) == ids(0, 1)


# case C4
def test_a_promotion_evicts_only_what_nobody_holds() -> None:
    tiny = Tiny(2)
    tiny.keep("a")
    tiny.begin(BOB, "b")
    assert fill(tiny, "c").block == 0  # evicts a
    assert tiny.pool.begin_fill(tiny.namespace, h("d")) is None
    tiny.check()


def test_a_promotion_may_ask_for_memory() -> None:
    tiny = Tiny(0, per_segment=2, spare_segments=1)
    assert tiny.pool.begin_fill(tiny.namespace, h("a")) == Grow(1)
    tiny.pool.add_segment()
    assert fill(tiny, "a").block == 0


def test_what_was_promoted_has_a_copy_below() -> None:
    tiny = Tiny(2)
    tiny.keep("a")
    complete(tiny, fill(tiny, "b"))
    assert tiny.pool.spill_candidates(9) == ids(0)
    assert tiny.reserve(BOB, 1) == ids(1)  # evicts b, younger but safe below
    assert tiny.namespace.dropped_unspilled == 0


def test_spill_candidates_are_the_next_to_go_without_a_copy() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    tiny.keep("c")
    assert tiny.pool.spill_candidates(9) == ids(1, 0, 2)
    assert tiny.pool.spill_candidates(1) == ids(1)
    ticket = tiny.pool.begin_spill(BlockId(1))
    assert tiny.pool.spill_candidates(9) == ids(0, 2)
    complete(tiny, ticket)
    assert tiny.pool.spill_candidates(9) == ids(0, 2)


def test_a_block_being_copied_is_not_evicted() -> None:
    tiny = Tiny(2)
    tiny.keep("a")
    ticket = tiny.pool.begin_spill(BlockId(0))
    assert tiny.reserve(BOB, 1) == ids(1)
    assert tiny.pool.begin_fill(tiny.namespace, h("z")) is None
    complete(tiny, ticket)
    assert tiny.reserve(BOB, 1) == ids(0)  # evicts a
    assert tiny.namespace.spills == 1


# case C2
def test_a_block_is_found_while_it_is_being_copied() -> None:
    tiny = Tiny(2)
    tiny.keep("a")
    ticket = tiny.pool.begin_spill(BlockId(0))
    begun = tiny.begin(BOB, "a")
    assert begun.blocks == ids(0)
    complete(tiny, ticket)
    assert tiny.status.num_references == 1
    tiny.release(BOB, begun.blocks)
    assert tiny.pool.spill_candidates(9) == []


# case C3
def test_a_failed_spill_leaves_the_block_where_it_was() -> None:
    tiny = Tiny(3)
    tiny.keep("a")
    tiny.keep("b")
    complete(tiny, tiny.pool.begin_spill(BlockId(0)), ok=False)
    assert tiny.pool.spill_candidates(9) == ids(0, 1)
    assert tiny.status.counters["failed_spills"] == 1
    tiny.reserve(BOB, 2)  # evicts a, unspilled
    assert tiny.namespace.dropped_unspilled == 1
    assert tiny.resident("a b") == "b"


def test_a_failed_spill_of_a_tail_leaves_it_older_than_its_head() -> None:
    tiny = Tiny(2)
    tiny.keep("a b")
    complete(tiny, tiny.pool.begin_spill(BlockId(1)), ok=False)
    assert tiny.pool.spill_candidates(9) == ids(1, 0)


def test_copying_does_not_make_a_block_look_used() -> None:
    tiny = Tiny(6)
    for name in ["a", "b", "c", "d"]:
        tiny.keep(name)
    spills = [tiny.pool.begin_spill(block) for block in ids(1, 3, 0)]
    complete(tiny, spills[1])  # d
    complete(tiny, spills[0])  # b: put before d
    complete(tiny, spills[2])  # a: put before b
    tiny.reserve(BOB, 3)  # evicts a
    assert tiny.resident("a b c d") == "b c d"
    tiny.reserve(BOB, 1)  # evicts b
    assert tiny.resident("a b c d") == "c d"
    tiny.reserve(BOB, 1)  # evicts d, copied, before c
    assert tiny.resident("a b c d") == "c"


def test_a_block_used_while_it_was_copied_is_as_young_as_its_use() -> None:
    tiny = Tiny(3)
    tiny.keep("a")
    ticket = tiny.pool.begin_spill(BlockId(0))
    complete(tiny, fill(tiny, "b"))
    tiny.release(BOB, tiny.begin(BOB, "a").blocks)
    complete(tiny, ticket)
    tiny.reserve(CAROL, 2)  # evicts b
    assert tiny.resident("a b") == "a"


# case B11
def test_a_second_spill_completion_does_nothing() -> None:
    tiny = Tiny(2)
    tiny.keep("a")
    ticket = tiny.pool.begin_spill(BlockId(0))
    complete(tiny, ticket, ok=False)
    tiny.begin(BOB, "a")
    complete(tiny, ticket)
    complete(tiny, ticket, ok=False)
    assert tiny.status.num_references == 1


def test_a_spill_that_ends_after_its_block_was_flushed_marks_nothing() -> None:
    tiny = Tiny(1)
    tiny.keep("a")
    ticket = tiny.pool.begin_spill(BlockId(0))
    tiny.pool.drop_namespaces([tiny.namespace.digest])
    tiny.check()
    assert tiny.states == (0, 0, 0, 1)  # the copy still reads it
    complete(tiny, ticket)
    assert tiny.states == (1, 0, 0, 0)
    assert tiny.resident("a") == ""
    assert tiny.namespace.spills == 0


def test_what_cannot_be_spilled_is_refused() -> None:
    tiny = Tiny(4)
    tiny.keep("a")
    tiny.reserve(BOB, 1)
    ticket = tiny.pool.begin_spill(BlockId(0))
    for block in ids(0, 1, 2, 77):  # being copied, reserved, free, unknown
        with pytest.raises(StateError):
            tiny.pool.begin_spill(block)
    complete(tiny, ticket)
    with pytest.raises(StateError):
        tiny.pool.begin_spill(BlockId(0))  # has a copy
    tiny.check()
