"""Dropping a namespace, and the counters that namespaces keep apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvd.block import NamespaceDigest
from kvd.errors import StateError
from kvd.pool import FillTicket, NamespaceCounters, NamespaceWords, WaitFor
from tests.pool.tiny import ALICE, BOB, CAROL, Tiny, h, hashes, ids


# case A9
def test_a_flush_frees_what_is_idle_and_hides_what_is_held() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    held = tiny.begin(BOB, "a")
    assert tiny.pool.drop_namespaces([tiny.namespace.digest]) == 2
    tiny.check()
    assert tiny.resident("a b") == ""
    assert tiny.states == (3, 0, 0, 1)
    assert tiny.begin(CAROL, "a").num_cached == 0
    tiny.release(BOB, held.blocks)
    assert tiny.states == (3, 1, 0, 0)
    assert tiny.namespace.flushed == 2


# case A9
def test_a_flushed_hash_can_be_sealed_anew_while_its_old_block_is_held() -> None:
    tiny = Tiny(4)
    tiny.keep("a")
    old = tiny.begin(BOB, "a")
    tiny.pool.drop_namespaces([tiny.namespace.digest])
    assert tiny.keep("a", CAROL) == ids(1)
    forked = tiny.pool.retain(BOB, old.blocks)
    assert forked == []
    tiny.release(BOB, old.blocks * 2)
    assert tiny.states == (3, 0, 0, 1)
    assert tiny.begin(BOB, "a").blocks == ids(1)


# case A9
@pytest.mark.parametrize("ok", [True, False])
def test_a_promotion_in_flight_does_not_bring_flushed_blocks_back(ok: bool) -> None:
    tiny = Tiny(4)
    ticket = tiny.pool.begin_fill(tiny.namespace, h("a"))
    assert isinstance(ticket, FillTicket)
    assert tiny.ask(ALICE, "a", may_wait=True) == WaitFor(h("a"))
    assert tiny.pool.drop_namespaces([tiny.namespace.digest]) == 1
    tiny.check()
    assert tiny.pools.take_woken() == [(0, h("a"))]
    assert tiny.states == (3, 0, 1, 0)  # the copy still writes it
    tiny.pool.complete_fill(ticket, ok)
    tiny.check()
    assert tiny.states == (4, 0, 0, 0)


def test_a_flush_touches_its_own_namespace_only() -> None:
    tiny = Tiny(4)
    other = tiny.pool.namespace(
        NamespaceDigest(h("other")), NamespaceWords(model="m", engine="e", adapter="x", block_tokens=16)
    )
    tiny.keep("a")
    block = tiny.reserve(ALICE, 1)
    tiny.pool.seal(ALICE, other, block, hashes("b"))
    assert tiny.pool.drop_namespaces([other.digest]) == 1
    assert tiny.resident("a b") == "a"
    assert tiny.pool.drop_namespaces([NamespaceDigest(h("never opened"))]) == 0


def test_several_namespaces_are_dropped_in_one_pass() -> None:
    tiny = Tiny(4)
    other = tiny.pool.namespace(NamespaceDigest(h("other")))
    tiny.keep("a")
    tiny.pool.seal(ALICE, other, tiny.reserve(ALICE, 1), hashes("b"))
    ticket = tiny.pool.begin_fill(other, h("c"))
    assert isinstance(ticket, FillTicket)
    with count_passes(tiny) as passes:
        assert tiny.pool.drop_namespaces([tiny.namespace.digest, other.digest, NamespaceDigest(h("x"))]) == 3
    assert passes == [1]
    assert (tiny.namespace.flushed, other.flushed) == (1, 2)
    assert tiny.resident("a b") == ""
    tiny.pool.complete_fill(ticket, True)
    tiny.check()


def test_where_nothing_can_be_found_no_block_is_looked_at() -> None:
    tiny = Tiny(4)
    other = tiny.pool.namespace(NamespaceDigest(h("other")))
    tiny.keep("a b")
    with count_passes(tiny) as passes:
        assert tiny.pool.drop_namespaces([other.digest]) == 0
    assert passes == [0]


@contextmanager
def count_passes(tiny: Tiny) -> Iterator[list[int]]:
    """How often every sealed block is looked at."""
    passes = [0]

    class Watched(dict):
        def items(self) -> object:
            passes[0] += 1
            return super().items()

    index = tiny.pool.store.index
    index.sealed = Watched(index.sealed)
    yield passes


def test_namespaces_count_apart_and_show_their_words() -> None:
    tiny = Tiny(4)
    other = tiny.pool.namespace(
        NamespaceDigest(h("other")), NamespaceWords(model="m", engine="e", has_salt=True, block_tokens=16)
    )
    assert tiny.pool.namespace(other.digest) is other
    tiny.keep("a b")
    tiny.pool.begin(BOB, other, hashes("x"), max_cached=1, num_blocks=1, announce=False, may_wait=False)
    first, second = tiny.pools.namespace_statuses()
    assert (first.num_sealed, first.counters["misses"], first.counters["seals"]) == (2, 2, 2)
    assert (second.num_sealed, second.counters["misses"], second.model, second.has_salt) == (0, 1, "m", True)
    assert second.block_tokens == 16
    assert tiny.status.counters["lookups"] == 3


def test_a_namespace_of_another_pool_is_a_defect() -> None:
    tiny = Tiny(4)
    stranger = NamespaceCounters(NamespaceDigest(h("stranger")), NamespaceWords())
    with pytest.raises(StateError):
        tiny.pool.begin_fill(stranger, h("a"))
    with pytest.raises(StateError):
        tiny.pool.seal(ALICE, stranger, [], [])
