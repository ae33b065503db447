"""Which block goes when blocks are short. Pools of four blocks; every id and every eviction is written out."""

from __future__ import annotations

import pytest

from kvd.errors import OutOfBlocks
from tests.pool.tiny import ALICE, BOB, CAROL, Tiny, h, hashes, ids


def test_the_least_recently_used_sequence_goes_first() -> None:
    tiny = Tiny(4)
    assert tiny.keep("a") == ids(0)
    assert tiny.keep("b") == ids(1)
    assert tiny.keep("c d") == ids(2, 3)
    tiny.release(BOB, tiny.begin(BOB, "a").blocks)  # a is now younger than b
    assert tiny.reserve(CAROL, 1) == ids(1)  # evicts b
    assert tiny.resident("a b c d") == "a c d"


def test_within_a_sequence_the_tail_goes_first() -> None:
    tiny = Tiny(4)
    assert tiny.keep("a b c d") == ids(0, 1, 2, 3)
    assert tiny.reserve(BOB, 1) == ids(3)  # evicts d
    assert tiny.reserve(BOB, 1) == ids(2)  # evicts c
    assert tiny.resident("a b c d") == "a b"
    assert tiny.pool.match(hashes("a b c d")) == 2


def test_a_dead_sessions_sequences_keep_their_heads_longest() -> None:
    tiny = Tiny(4)
    tiny.seal(ALICE, tiny.begin(ALICE, "a b c d").blocks, "a b c d")
    tiny.pools.end_session(ALICE)
    assert tiny.reserve(BOB, 2) == ids(2, 3)  # evicts d, then c
    assert tiny.resident("a b c d") == "a b"


def test_a_block_with_a_copy_below_goes_before_an_older_one_without() -> None:
    tiny = Tiny(4)
    assert tiny.keep("a") == ids(0)
    assert tiny.keep("b") == ids(1)
    tiny.pool.complete_spill(tiny.pool.begin_spill(ids(1)[0]), True)
    assert tiny.reserve(CAROL, 3) == ids(1, 2, 3)  # evicts b though a is older
    assert tiny.resident("a b") == "a"
    assert tiny.namespace.evictions == 1
    assert tiny.namespace.dropped_unspilled == 0
    assert tiny.reserve(CAROL, 1) == ids(0)  # evicts a, which had no copy
    assert tiny.namespace.dropped_unspilled == 1


# case A6
def test_an_evicted_and_reused_block_answers_only_to_its_new_hash() -> None:
    tiny = Tiny(1)
    assert tiny.keep("old") == ids(0)
    assert tiny.keep("new") == ids(0)  # evicts old
    assert tiny.resident("old new") == "new"
    assert tiny.begin(BOB, "old", num_blocks=0).num_cached == 0
    assert tiny.begin(BOB, "new").blocks == ids(0)


# case A6
def test_a_reserved_block_no_longer_answers_to_the_hash_it_had() -> None:
    tiny = Tiny(1)
    tiny.keep("old")
    assert tiny.reserve(BOB, 1) == ids(0)  # evicts old
    assert tiny.pool.match([h("old")]) == 0
    tiny.release(BOB, reserved=ids(0))
    assert tiny.pool.match([h("old")]) == 0


# case A7
def test_what_was_not_sealed_is_never_found() -> None:
    tiny = Tiny(4)
    begun = tiny.begin(ALICE, "a b", num_blocks=3)
    tiny.seal(ALICE, begun.blocks[:2], "a b")  # block 2, the partial tail, stays reserved
    other = tiny.begin(BOB, "a b partial", num_blocks=3)
    assert (other.num_cached, other.blocks) == (2, ids(0, 1, 3))


# case A7
def test_a_wholly_cached_prompt_attaches_no_more_than_it_is_allowed_to() -> None:
    tiny = Tiny(4)
    tiny.keep("a b c")
    begun = tiny.begin(BOB, "a b c", max_cached=2, num_blocks=3, announce=True)
    assert (begun.num_cached, begun.blocks, begun.num_announced) == (2, ids(0, 1, 3), 0)


# case B4
def test_asking_pins_nothing_and_makes_nothing_look_used() -> None:
    tiny = Tiny(4)
    tiny.keep("a")
    tiny.keep("b c d")
    assert tiny.pool.match(hashes("a")) == 1
    assert tiny.pool.match(hashes("b c d")) == 3
    assert tiny.status.num_references == 0
    assert tiny.reserve(BOB, 1) == ids(0)  # evicts a, still the oldest
    assert sorted(tiny.reserve(BOB, 3)) == ids(1, 2, 3)


# case B5
def test_a_prefix_found_in_the_same_request_is_not_evicted_for_its_rest() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")  # the oldest: would be evicted first
    tiny.keep("x y")
    begun = tiny.begin(BOB, "a b c d")
    assert (begun.num_cached, begun.blocks) == (2, ids(0, 1, 2, 3))  # evicts y and x
    assert tiny.resident("a b x y") == "a b"


# case B5
def test_a_request_that_would_need_its_own_prefix_fails_and_changes_nothing() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    tiny.keep("x y")
    with pytest.raises(OutOfBlocks):
        tiny.ask(BOB, "a b c d e")
    tiny.check()
    assert tiny.resident("a b x y") == "a b x y"
    assert tiny.status.num_references == 0
    assert tiny.namespace.evictions == 0


# case B7
def test_a_pool_full_of_held_blocks_fails_at_once_and_names_the_holders() -> None:
    tiny = Tiny(4)
    held = tiny.begin(ALICE, "a b c")
    tiny.seal(ALICE, held.blocks[:2], "a b")
    tiny.reserve(BOB, 1)
    before = tiny.status
    with pytest.raises(OutOfBlocks, match=r"session 1 \(uid 1000\) 2 referenced 1 reserved; session 2 \(uid 1001\) 0"):
        tiny.pool.reserve(CAROL, 1)
    tiny.check()
    assert tiny.states == (0, 2, 0, 2)
    assert tiny.status.counters == before.counters | {"out_of_blocks": 1}


def test_raw_reservations_are_all_or_nothing() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    with pytest.raises(OutOfBlocks):
        tiny.pool.reserve(BOB, 5)
    assert tiny.resident("a b") == "a b"
    assert sorted(tiny.reserve(BOB, 4)) == ids(0, 1, 2, 3)  # evicts b and a
    assert tiny.states == (0, 4, 0, 0)


def test_counters_tell_what_happened() -> None:
    tiny = Tiny(4)
    tiny.keep("a b c")
    tiny.release(BOB, tiny.begin(BOB, "a b").blocks)
    tiny.keep("x y")  # evicts c
    counters = tiny.status.counters
    assert counters["lookups"] == 3 + 2 + 2
    assert counters["hits"] == 2
    assert counters["misses"] == 5
    assert counters["allocations"] == 5
    assert counters["seals"] == 5
    assert counters["evictions"] == 1
    assert counters["duplicate_seals"] == 0
