"""References, reservations, sessions and quotas."""

from __future__ import annotations

import pytest

from kvd.block import SessionId
from kvd.errors import InvalidRequest, NotOwned, OutOfBlocks, QuotaExceeded, StateError
from kvd.pool import LeaseFigures
from tests.pool.tiny import ALICE, BLOCK, BOB, CAROL, Tiny, hashes, ids


# case B3
def test_giving_back_what_is_not_held_is_refused_and_changes_nothing() -> None:
    tiny = Tiny(8)
    tiny.keep("idle")  # block 0
    mine = tiny.begin(ALICE, "a b", num_blocks=3)  # blocks 1 2 3
    tiny.seal(ALICE, mine.blocks[:2], "a b")
    others = tiny.begin(BOB, "c", num_blocks=2)  # blocks 4 5
    tiny.seal(BOB, others.blocks[:1], "c")
    before = tiny.states, tiny.status.num_references, tiny.status.counters
    wrong: list[tuple[list[int], list[int]]] = [
        ([1, 1], []),  # twice, referenced once
        ([1, 0], []),  # 0 is idle
        ([4], []),  # Bob's
        ([3], []),  # reserved, not referenced
        ([7], []),  # free
        ([10**9], []),  # not in any segment
        ([1, 2], [5]),  # Bob's reservation: the references stay too
        ([], [3, 3]),
        ([], [1]),  # sealed, not reserved
    ]
    for blocks, reserved in wrong:
        with pytest.raises(NotOwned):
            tiny.pool.release(ALICE, blocks=ids(*blocks), reserved=ids(*reserved))
        tiny.check()
    assert (tiny.states, tiny.status.num_references, tiny.status.counters) == before


# case B3
def test_a_second_release_is_refused() -> None:
    tiny = Tiny(4)
    blocks = tiny.seal(ALICE, tiny.reserve(ALICE, 1), "a")
    tiny.begin(BOB, "a")
    tiny.release(ALICE, blocks)
    with pytest.raises(NotOwned):
        tiny.pool.release(ALICE, blocks=blocks)
    with pytest.raises(NotOwned):
        tiny.pool.retain(ALICE, blocks)
    tiny.check()
    assert tiny.status.num_references == 1  # Bob's


def test_a_fork_holds_its_own_references_and_reservations() -> None:
    tiny = Tiny(4)
    blocks = tiny.seal(ALICE, tiny.reserve(ALICE, 2), "a b")
    assert tiny.pool.retain(ALICE, blocks, 1) == ids(2)
    assert tiny.status.num_references == 4
    tiny.release(ALICE, blocks)  # the parent closes
    tiny.release(ALICE, blocks[1:])  # the child truncates: the tail goes idle
    assert sorted(tiny.reserve(BOB, 2)) == ids(1, 3)  # evicts b; a is still held
    with pytest.raises(OutOfBlocks):
        tiny.pool.reserve(BOB, 1)


def test_a_fork_that_finds_no_room_takes_no_references() -> None:
    tiny = Tiny(2)
    blocks = tiny.seal(ALICE, tiny.reserve(ALICE, 2), "a b")
    with pytest.raises(OutOfBlocks):
        tiny.pool.retain(ALICE, blocks, 1)
    tiny.check()
    assert tiny.status.num_references == 2


def test_two_sequences_of_a_session_share_a_prefix_and_give_it_back_in_turn() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    first, second = tiny.begin(ALICE, "a b"), tiny.begin(ALICE, "a b x")
    assert second.blocks == ids(0, 1, 2)
    assert tiny.pools.session_figures(ALICE) == LeaseFigures(4, 1, 3 * BLOCK, 0)
    tiny.release(ALICE, first.blocks)
    assert tiny.pools.session_figures(ALICE).num_references == 2
    tiny.release(ALICE, second.blocks[:2], reserved=second.blocks[2:])
    assert tiny.pools.session_figures(ALICE) == LeaseFigures(0, 0, 0, 0)


def test_a_repeated_hash_in_one_begin_is_one_block_with_two_references() -> None:
    tiny = Tiny(4)
    tiny.keep("a")
    begun = tiny.begin(BOB, "a a")
    assert begun.blocks == ids(0, 0)
    assert tiny.pools.session_figures(BOB) == LeaseFigures(2, 0, BLOCK, 0)
    tiny.release(BOB, begun.blocks)
    assert tiny.status.num_references == 0


# case B1
def test_everything_a_session_held_goes_back_when_it_ends() -> None:
    tiny = Tiny(8)
    shared = tiny.seal(ALICE, tiny.reserve(ALICE, 2), "a b")
    tiny.pool.retain(ALICE, shared)
    tiny.begin(ALICE, "x", announce=True)
    tiny.begin(BOB, "a")
    tiny.pools.end_session(ALICE)
    tiny.check()
    assert tiny.states == (6, 0, 0, 2)
    assert tiny.status.num_references == 1  # Bob's on a
    assert sorted(tiny.reserve(BOB, 7)) == ids(1, 2, 3, 4, 5, 6, 7)  # evicts b


# case B2
def test_a_writers_blocks_are_free_at_once_and_were_never_seen() -> None:
    tiny = Tiny(2)
    tiny.begin(ALICE, "a b")
    tiny.pools.end_session(ALICE)
    assert tiny.states == (2, 0, 0, 0)
    assert tiny.resident("a b") == ""


def test_what_a_process_may_still_write_on_a_card_is_nobodys_until_it_is_gone() -> None:
    tiny = Tiny(4, device="a card")
    tiny.seal(ALICE, tiny.reserve(ALICE, 1), "a")
    tiny.begin(ALICE, "x", announce=True)
    assert tiny.pools.end_session(ALICE, keep_on_cards=True)
    tiny.check()
    assert tiny.states == (2, 1, 0, 1)
    assert tiny.status.num_references == 0
    assert tiny.begin(BOB, "x", announce=True).num_announced == 1  # what it was to compute is another's at once
    with pytest.raises(OutOfBlocks, match=r"session 1 .* 1 reserved"):
        tiny.pool.reserve(BOB, 3)
    assert not tiny.pools.end_session(ALICE)
    tiny.check()
    assert len(tiny.reserve(BOB, 3)) == 3  # evicts a


def test_a_session_that_may_write_nothing_on_a_card_ends_at_once() -> None:
    on_host, on_card = Tiny(2), Tiny(2, device="a card")
    on_host.reserve(ALICE, 2)
    on_card.seal(ALICE, on_card.reserve(ALICE, 2), "a b")
    for tiny in (on_host, on_card):
        assert not tiny.pools.end_session(ALICE, keep_on_cards=True)
        tiny.check()
        assert len(tiny.reserve(BOB, 2)) == 2


# case B16
def test_an_ended_session_gets_nothing_any_more() -> None:
    tiny = Tiny(4)
    tiny.pools.end_session(ALICE)
    with pytest.raises(NotOwned):
        tiny.ask(ALICE, "a")
    with pytest.raises(NotOwned):
        tiny.pool.reserve(ALICE, 1)
    with pytest.raises(NotOwned):
        tiny.pool.seal(ALICE, tiny.namespace, [], [])
    with pytest.raises(NotOwned):
        tiny.pool.release(ALICE)
    with pytest.raises(NotOwned):
        tiny.pools.end_session(ALICE)
    with pytest.raises(NotOwned):
        tiny.pools.session_figures(SessionId(99))
    tiny.check()
    assert tiny.states == (4, 0, 0, 0)


def test_a_session_opens_once() -> None:
    with pytest.raises(StateError):
        Tiny().pools.open_session(ALICE, 0)


def test_negative_counts_are_refused() -> None:
    tiny = Tiny()
    with pytest.raises(InvalidRequest):
        tiny.pool.reserve(ALICE, -1)
    with pytest.raises(InvalidRequest):
        tiny.ask(ALICE, "a", num_blocks=-1)
    with pytest.raises(InvalidRequest):
        tiny.ask(ALICE, "a", max_cached=-1)


# case B10
def test_a_session_may_hold_its_quota_and_no_more() -> None:
    tiny = Tiny(8, session_quota=3)
    tiny.keep("a b", BOB)
    tiny.reserve(ALICE, 1)
    with pytest.raises(QuotaExceeded, match="session 1 holds 4096 bytes, wants 12288 more and may hold 12288"):
        tiny.ask(ALICE, "a b c")
    tiny.check()
    assert tiny.pools.session_figures(ALICE).held_nbytes == BLOCK
    tiny.begin(ALICE, "a b")
    tiny.begin(ALICE, "a b")  # what it holds already counts once
    with pytest.raises(QuotaExceeded):
        tiny.pool.reserve(ALICE, 1)
    assert tiny.reserve(BOB, 3) == ids(3, 4, 5)  # others are served


# case B10
def test_a_user_may_hold_his_quota_over_all_his_sessions() -> None:
    tiny = Tiny(8, uid_quota=3)
    tiny.reserve(BOB, 2)
    with pytest.raises(QuotaExceeded, match="uid 1001 with 2 sessions holds 8192 bytes"):
        tiny.pool.reserve(CAROL, 2)
    tiny.reserve(CAROL, 1)
    tiny.reserve(ALICE, 3)
    tiny.pools.end_session(BOB)
    tiny.reserve(CAROL, 2)


def test_losing_a_race_does_not_fail_a_seal_by_quota() -> None:
    tiny = Tiny(4, session_quota=1)
    mine = tiny.reserve(ALICE, 1)
    tiny.keep("a", BOB)
    assert tiny.seal(ALICE, mine, "a") == ids(1)
    assert tiny.pools.session_figures(ALICE).held_nbytes == 2 * BLOCK
    tiny.release(ALICE, reserved=mine)
    assert tiny.pools.session_figures(ALICE).held_nbytes == BLOCK


def test_an_idle_block_released_last_is_the_last_to_go() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    tiny.keep("c d")
    tiny.release(BOB, tiny.begin(BOB, "a b").blocks)
    tiny.reserve(CAROL, 2)  # evicts d and c
    assert tiny.pool.match(hashes("a b")) == 2
