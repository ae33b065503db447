"""Publishing blocks, and what happens when somebody was first."""

from __future__ import annotations

import pytest

from kvd.errors import InvalidRequest, NotOwned
from kvd.pool import FillTicket
from tests.pool.tiny import ALICE, BOB, Tiny, h, hashes, ids


def test_a_sealed_block_is_found_while_its_writer_still_holds_it() -> None:
    tiny = Tiny(4)
    tiny.seal(ALICE, tiny.begin(ALICE, "a").blocks, "a")
    assert tiny.begin(BOB, "a").blocks == ids(0)
    assert tiny.status.num_references == 2


# case A10
def test_a_duplicate_seal_gives_the_first_block_and_leaves_the_writer_its_copy() -> None:
    tiny = Tiny(4)
    first, second = tiny.begin(ALICE, "a"), tiny.begin(BOB, "a")
    assert tiny.seal(ALICE, first.blocks, "a") == ids(0)
    assert tiny.seal(BOB, second.blocks, "a") == ids(0)
    assert tiny.states == (2, 1, 0, 1)  # block 1 is still Bob's alone
    assert tiny.begin(ALICE, "x y").blocks == ids(2, 3)  # nobody gets block 1
    tiny.release(BOB, reserved=second.blocks)
    assert tiny.reserve(ALICE, 1) == ids(1)
    assert tiny.namespace.duplicate_seals == 1


# case A10
def test_a_duplicate_seal_references_an_idle_block_so_that_it_stays() -> None:
    tiny = Tiny(2)
    begun = tiny.begin(BOB, "a")
    assert tiny.keep("a") == ids(1)
    assert tiny.seal(BOB, begun.blocks, "a") == ids(1)
    tiny.release(BOB, reserved=begun.blocks)
    assert tiny.reserve(ALICE, 1) == ids(0)  # block 1 is not evicted
    tiny.release(BOB, ids(1))
    assert tiny.reserve(ALICE, 1) == ids(1)  # evicts a


def test_one_hash_twice_in_one_request_stands_for_one_block() -> None:
    tiny = Tiny(4)
    blocks = tiny.reserve(ALICE, 2)
    assert tiny.seal(ALICE, blocks, "a a") == ids(0, 0)
    assert tiny.states == (2, 1, 0, 1)
    assert tiny.status.num_references == 2
    tiny.release(ALICE, ids(0, 0), reserved=ids(1))
    assert tiny.states == (3, 0, 0, 1)


def test_a_seal_that_meets_a_promotion_of_its_hash_wins() -> None:
    tiny = Tiny(4)
    ticket = tiny.pool.begin_fill(tiny.namespace, h("a"))
    assert isinstance(ticket, FillTicket)
    assert ticket.block == 0
    assert tiny.seal(ALICE, tiny.reserve(ALICE, 1), "a") == ids(1)
    assert tiny.states == (2, 0, 1, 1)  # the copy into block 0 still runs
    tiny.pool.complete_fill(ticket, True)
    tiny.check()
    assert tiny.states == (3, 0, 0, 1)
    assert tiny.begin(BOB, "a").blocks == ids(1)


def test_seals_of_what_the_session_has_not_reserved_change_nothing() -> None:  # case B3
    tiny = Tiny(4)
    reserved = tiny.reserve(ALICE, 2)
    sealed = tiny.seal(ALICE, tiny.reserve(ALICE, 1), "s")
    before = tiny.states, tiny.status.counters
    for blocks in (reserved, [reserved[0], sealed[0]], ids(3), ids(99), [reserved[0], reserved[0]]):
        with pytest.raises(NotOwned):
            tiny.pool.seal(BOB if blocks is reserved else ALICE, tiny.namespace, blocks, hashes("x y")[: len(blocks)])
        tiny.check()
    with pytest.raises(InvalidRequest):
        tiny.pool.seal(ALICE, tiny.namespace, reserved, hashes("x"))
    with pytest.raises(InvalidRequest):
        tiny.pool.seal(ALICE, tiny.namespace, reserved, hashes("x y"), [7])
    assert (tiny.states, tiny.status.counters) == before
    assert tiny.resident("x y") == ""


def test_checksums_stay_with_their_block_and_go_with_its_hash() -> None:
    tiny = Tiny(1)
    tiny.pool.seal(ALICE, tiny.namespace, tiny.reserve(ALICE, 1), hashes("a"), [2**64 - 1])
    assert tiny.pool.checksums(ALICE, ids(0)) == [2**64 - 1]
    with pytest.raises(NotOwned):
        tiny.pool.checksums(BOB, ids(0))
    tiny.release(ALICE, ids(0))
    tiny.seal(BOB, tiny.reserve(BOB, 1), "b")  # evicts a
    assert tiny.pool.checksums(BOB, ids(0)) == [0]
