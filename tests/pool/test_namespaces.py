"""Namespaces are many (a salt each user, say), so those that mean nothing any more are forgotten."""

from __future__ import annotations

from kvd.block import NamespaceDigest
from kvd.pool import FillTicket
from tests.pool.tiny import ALICE, Tiny, h, hashes


def test_a_namespace_without_blocks_is_forgotten_and_its_counts_stay() -> None:
    tiny = Tiny(4)
    tiny.keep("a b")
    before = tiny.status.counters
    other = tiny.pool.namespace(NamespaceDigest(h("other")))
    assert tiny.pools.num_namespaces == 2
    assert tiny.pools.forget_namespaces(in_use=()) == [other.digest]
    assert tiny.status.counters == before

    assert tiny.pool.drop_namespaces([tiny.namespace.digest]) == 2
    assert tiny.pools.forget_namespaces(in_use={tiny.namespace.digest}) == []
    counted = tiny.status.counters
    assert tiny.pools.forget_namespaces(in_use=()) == [tiny.namespace.digest]
    assert tiny.pools.num_namespaces == 0
    assert tiny.status.counters == counted
    assert counted["seals"] == 2
    tiny.check()


def test_a_namespace_with_a_copy_under_way_stays() -> None:
    tiny = Tiny(4)
    ticket = tiny.pool.begin_fill(tiny.namespace, h("a"))
    assert isinstance(ticket, FillTicket)
    assert tiny.pools.forget_namespaces(in_use=()) == []
    tiny.pool.complete_fill(ticket, ok=True)
    assert tiny.pools.forget_namespaces(in_use=()) == []  # a is there now
    assert tiny.pool.match(hashes("a")) == 1

    (block,) = tiny.begin(ALICE, "a").blocks
    tiny.release(ALICE, [block])
    tiny.check()
