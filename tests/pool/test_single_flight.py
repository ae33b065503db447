"""Announcements: who computes, who waits, and that nobody waits for ever."""

from __future__ import annotations

from kvd.pool import Begun, LeaseFigures, WaitFor
from tests.pool.tiny import ALICE, BLOCK, BOB, CAROL, Tiny, h, hashes, ids


# case B8
def test_the_second_to_ask_waits_and_each_sealed_block_wakes_it() -> None:
    tiny = Tiny(8)
    writing = tiny.begin(ALICE, "a b", announce=True, may_wait=True)
    assert writing.num_announced == 2
    assert tiny.ask(BOB, "a b", announce=True, may_wait=True) == WaitFor(h("a"))
    assert tiny.pools.session_figures(BOB) == LeaseFigures(0, 0, 0, 0)
    assert tiny.pools.take_woken() == []
    tiny.seal(ALICE, writing.blocks[:1], "a")
    assert tiny.pools.take_woken() == [(0, h("a"))]
    assert tiny.ask(BOB, "a b", announce=True, may_wait=True) == WaitFor(h("b"))
    tiny.seal(ALICE, writing.blocks[1:], "b")
    assert tiny.pools.take_woken() == [(0, h("b"))]
    assert tiny.ask(BOB, "a b", announce=True, may_wait=True) == Begun(2, ids(0, 1), 0)
    assert not tiny.pools.has_announcements(ALICE)


# case B8
def test_the_wait_passes_to_the_next_when_the_writer_dies() -> None:
    tiny = Tiny(8)
    writing = tiny.begin(ALICE, "a b", announce=True)
    assert tiny.ask(BOB, "a b", announce=True, may_wait=True) == WaitFor(h("a"))
    assert tiny.ask(CAROL, "a b", announce=True, may_wait=True) == WaitFor(h("a"))
    tiny.seal(ALICE, writing.blocks[:1], "a")
    tiny.pools.take_woken()
    assert tiny.ask(BOB, "a b", announce=True, may_wait=True) == WaitFor(h("b"))
    assert tiny.ask(CAROL, "a b", announce=True, may_wait=True) == WaitFor(h("b"))
    tiny.pools.end_session(ALICE)
    assert tiny.pools.take_woken() == [(0, h("b"))]
    taking_over = tiny.begin(BOB, "a b", announce=True, may_wait=True)
    assert (taking_over.num_cached, taking_over.num_announced) == (1, 1)
    assert tiny.ask(CAROL, "a b", announce=True, may_wait=True) == WaitFor(h("b"))


def test_a_withdrawn_announcement_wakes_too() -> None:
    tiny = Tiny(8)
    begun = tiny.begin(ALICE, "a", announce=True)
    assert tiny.ask(BOB, "a", may_wait=True) == WaitFor(h("a"))
    tiny.pool.release(ALICE, reserved=begun.blocks, hashes=hashes("a"))
    tiny.check()
    assert tiny.pools.take_woken() == [(0, h("a"))]
    tiny.pool.release(ALICE, hashes=hashes("a never"))  # gone already: passed over
    assert tiny.pools.take_woken() == []


def test_nobody_can_withdraw_anothers_announcement() -> None:
    tiny = Tiny(8)
    tiny.begin(ALICE, "a", announce=True)
    tiny.pool.release(BOB, hashes=hashes("a"))
    assert tiny.pools.has_announcements(ALICE)


def test_a_session_does_not_wait_for_itself() -> None:
    tiny = Tiny(8)
    tiny.begin(ALICE, "a", announce=True)
    assert tiny.begin(ALICE, "a", announce=True, may_wait=True).blocks == ids(1)


def test_who_may_not_wait_computes_without_announcing_what_another_announced() -> None:
    tiny = Tiny(8)
    tiny.begin(ALICE, "a b", announce=True)
    begun = tiny.begin(BOB, "a b c", announce=True, may_wait=False)
    assert (begun.num_cached, begun.num_announced) == (0, 1)  # c only
    assert tiny.ask(CAROL, "a b c", may_wait=True) == WaitFor(h("a"))
    tiny.seal(BOB, begun.blocks, "a b c")  # faster than Alice: her announcements are over
    assert tiny.pools.take_woken() == [(0, h("a"))]
    assert not tiny.pools.has_announcements(ALICE)
    assert not tiny.pools.has_announcements(BOB)


def test_a_resident_block_behind_a_gap_is_not_announced() -> None:
    tiny = Tiny(8)
    tiny.keep("b")
    assert tiny.begin(ALICE, "a b c", announce=True).num_announced == 3
    assert tiny.pools.session_figures(ALICE).num_announced == 2
    assert tiny.begin(BOB, "x b", announce=True).num_announced == 2
    assert tiny.pools.session_figures(BOB).num_announced == 1


def test_a_missing_block_that_would_not_be_attached_is_no_reason_to_wait() -> None:
    tiny = Tiny(8)
    tiny.keep("a")
    tiny.begin(ALICE, "a b", announce=True)
    assert tiny.begin(BOB, "a b", max_cached=1, may_wait=True).num_cached == 1


# case B13
def test_two_sessions_that_want_each_others_blocks_hold_nothing_while_they_wait() -> None:
    tiny = Tiny(8)
    tiny.begin(ALICE, "x", announce=True)
    tiny.begin(BOB, "y", announce=True)
    assert tiny.pools.has_announcements(ALICE)
    assert tiny.pools.has_announcements(BOB)
    assert tiny.ask(ALICE, "y", may_wait=True) == WaitFor(h("y"))
    assert tiny.ask(BOB, "x", may_wait=True) == WaitFor(h("x"))
    assert tiny.pools.session_figures(ALICE) == LeaseFigures(0, 1, BLOCK, 1)
    assert tiny.begin(ALICE, "y", may_wait=False).num_cached == 0  # and can go on alone at any time
    tiny.pools.end_session(BOB)
    assert tiny.pools.take_woken() == [(0, h("y"))]


# case B13
def test_extending_never_waits() -> None:
    tiny = Tiny(4)
    tiny.begin(ALICE, "x", announce=True)
    tiny.begin(BOB, "y", announce=True)
    assert tiny.reserve(ALICE, 1) == ids(2)
    assert tiny.reserve(BOB, 1) == ids(3)
