"""A flush is final: nothing that was under way, here or in another daemon, brings a flushed block back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvd.block import NamespaceDigest
from kvd.errors import TierUnavailable
from kvd.mover import Fill, Flush, Learn, ListNames, Lookup, Spill
from kvd.protocol import requests
from kvd.protocol.replies import Begun, Flushed
from kvd.tiers.base import TierKey
from kvd.tiers.names import name_of
from tests.service.harness import House, error_code, expect, names
from tests.service.tiers import TieredClient, TieredHouse
from tests.support.dict_tier import DictTier

EIGHT = names(*"abcdefgh")


@pytest.fixture
def house() -> Iterator[TieredHouse]:
    house = TieredHouse(low_watermark=0.25, high_watermark=0.5)
    yield house
    house.check()
    house.close()


def opened(house: TieredHouse, **more: object) -> TieredClient:
    client = house.client(uid=0)
    client.open(**more)
    return client


def flush(client: TieredClient, **fields: object) -> Flushed:
    reply = client.ask(requests.Flush, **fields)
    if reply is None:
        for kind in (Flush, ListNames, Flush):
            client.house.run_mover(kind)
        reply = client.answer()
    return expect(Flushed, reply)


def unopened(tier: DictTier, *, tenant: str = "gid:100", model: str = "model") -> TierKey:
    """A block that another daemon left in the tier, of a namespace nobody here opened."""
    namespace = NamespaceDigest(os.urandom(32))
    key = TierKey(namespace, EIGHT[0])
    tier.generation(namespace, name_of(namespace, tenant=tenant, model=model))
    tier.blocks[key] = b"x"
    return key


def found(client: TieredClient) -> int:
    reply = client.try_begin(EIGHT)
    if reply is None:
        client.house.run_mover()
        reply = client.answer()
    begun = expect(Begun, reply)
    return begun.num_cached


def test_no_tier_returns_a_flushed_block(house: TieredHouse) -> None:  # case A9
    client = opened(house)
    client.publish(EIGHT)
    house.run_mover()
    assert house.held_below()
    reply = flush(client)
    assert (reply.num_namespaces, reply.num_blocks, reply.untold) == (1, 8, [])
    assert not house.held_below()
    assert found(client) == 0


def test_a_spill_in_flight_does_not_bring_it_back(house: TieredHouse) -> None:  # case A9
    client = opened(house)
    client.publish(EIGHT)
    running = house.mover.waiting(Spill)
    for job in running:
        house.mover.begin(job)
    flush(client)
    for job in running:
        house.mover.end(job)
    house.mover_done()
    assert not house.held_below()
    assert found(client) == 0


def test_a_promotion_in_flight_does_not_bring_it_back(house: TieredHouse) -> None:  # case A9
    client, other = opened(house), opened(house)
    house.put_below(client, EIGHT)
    client.try_begin(EIGHT)
    house.run_mover(Lookup)
    running = house.mover.waiting(Fill)
    for job in running:
        house.mover.begin(job)
    assert other.ask(requests.Flush) is None
    for job in running:
        house.mover.end(job)
    house.mover_done()
    assert expect(Begun, client.answer()).num_cached == 0
    house.run_mover()
    client.die()
    assert found(other) == 0


def test_an_answer_from_before_the_flush_starts_nothing(house: TieredHouse) -> None:  # case A9
    client, other = opened(house), opened(house)
    house.put_below(client, EIGHT)
    client.try_begin(EIGHT)
    (lookup,) = house.mover.waiting(Lookup)
    house.mover.do(lookup)  # it says "there", and the loop has not looked yet
    assert other.ask(requests.Flush) is None
    house.mover_done()
    assert not house.mover.waiting(Fill)
    assert expect(Begun, client.answer()).num_cached == 0


def test_while_a_flush_is_on_its_way_nothing_is_asked_or_copied(house: TieredHouse) -> None:  # case A9
    client, other = opened(house), opened(house)
    house.put_below(client, EIGHT)
    assert other.ask(requests.Flush) is None
    begun = client.begin(EIGHT)  # at once: asking below is no use now
    client.seal(begun.reserved, EIGHT)
    client.release(begun.reserved)
    assert not house.mover.waiting(Spill)
    house.run_mover(Flush)
    house.run_mover()
    assert len(house.held_below()) == 4, "what was computed after the flush lives on"


def test_another_daemon_that_shares_the_tier_forgets_too() -> None:  # case A9
    one = TieredHouse(spill="write_through")
    two = TieredHouse(tiers=one.inner, spill="write_through")
    writer, flusher = opened(one), opened(two)
    writer.publish(EIGHT[:4])
    one.run_mover()
    flush(flusher)
    assert not one.held_below()
    # It still has them in its pool and spills another, which tells it; nothing of before can be found below.
    writer.publish(EIGHT)
    one.run_mover(Spill)
    assert not one.held_below()
    assert writer.match(EIGHT) == 0
    one.run_mover()
    writer.publish(EIGHT[:3])
    one.run_mover()
    assert one.held_below() == set(EIGHT[:3]), "it goes on under the new generation"
    one.close()
    two.close()


def test_a_flush_by_another_daemon_is_heard_of_by_asking_now_and_then(house: TieredHouse) -> None:  # case A9
    client = opened(house)
    client.publish(EIGHT[:4])
    house.below.flushed_elsewhere(client.digest)
    house.pass_time(6.0)
    house.run_mover()
    assert client.match(EIGHT[:4]) == 0
    client.publish(EIGHT)
    house.run_mover()
    assert len(house.held_below()) == 4, "spilling goes on under the new generation"


def test_a_tier_that_cannot_be_told_is_named(house: TieredHouse) -> None:
    client = opened(house)
    house.tier.fail_next("flush", TierUnavailable("gone"))
    assert flush(client).untold == ["redis"]


def test_tiers_are_named_when_the_thread_that_tells_them_dies() -> None:
    house = TieredHouse(tiers=[DictTier(name="host"), DictTier(name="redis")])
    client = opened(house)
    for tier, expected in (("", ["host", "redis"]), ("redis", ["redis"])):
        assert client.ask(requests.Flush, tier=tier) is None
        lose_flushes(house, 3)
        (question,) = house.mover.waiting(ListNames)
        house.mover.lose(question)
        house.mover_done()
        reply = expect(Flushed, client.answer())
        assert (reply.untold, reply.unlisted) == (expected, expected)
    house.close()


def lose_flushes(house: TieredHouse, times: int) -> None:
    for _ in range(times):
        (job,) = house.mover.waiting(Flush)
        house.mover.lose(job)
        house.mover_done()


def test_a_flush_whose_thread_dies_is_tried_again(house: TieredHouse) -> None:  # case A9
    client = opened(house)
    house.put_below(client, EIGHT)
    assert client.ask(requests.Flush, namespace=client.digest) is None
    lose_flushes(house, 2)
    assert client.answer() is None
    house.run_mover()
    assert expect(Flushed, client.answer()).untold == []
    assert not house.held_below()


def test_one_that_fails_each_time_is_carried_out_later_and_nothing_is_read_before(  # case A9
    house: TieredHouse,
) -> None:
    client = opened(house)
    house.put_below(client, EIGHT)
    assert client.ask(requests.Flush, namespace=client.digest) is None
    lose_flushes(house, 3)
    assert expect(Flushed, client.answer()).untold == ["redis"]
    assert found(client) == 0
    assert house.held_below() == set(EIGHT)
    house.pass_time(6.0)
    lose_flushes(house, 1)
    house.pass_time(6.0)
    house.run_mover()
    assert not house.held_below()
    client.die()
    opened(house).publish(EIGHT)
    house.run_mover()
    assert len(house.held_below()) == 4, "it goes on under the new generation"


def test_nor_is_what_was_not_open_then_read_before(house: TieredHouse) -> None:  # case A9
    client = opened(house)
    key = unopened(house.below)
    house.below.blocks = {TierKey(key.namespace, one): b"x" for one in EIGHT}
    assert client.ask(requests.Flush, namespace=key.namespace) is None
    lose_flushes(house, 3)
    expect(Flushed, client.answer())
    # As if the namespace were opened here now.
    assert house.service.below is not None
    lineage = house.service.below.lineages.open(
        house.pool, key.namespace, 2, name_of(key.namespace, tenant="gid:100", model="model")
    )
    house.service.below.flushing.opened(lineage)
    assert lineage.num_flushing == 1
    house.pass_time(6.0)
    house.run_mover()
    assert lineage.num_flushing == 0
    assert not house.held_below()


def test_a_generation_learnt_before_a_flush_is_not_used_after_it(house: TieredHouse) -> None:
    client = opened(house)
    house.pass_time(6.0)
    (learn,) = house.mover.waiting(Learn)
    house.mover.do(learn)
    flush(client)
    client.publish(EIGHT)
    house.run_mover()
    assert len(house.held_below()) == 4


def test_one_tier_alone_can_be_flushed() -> None:
    house = TieredHouse(tiers=[DictTier(name="host"), DictTier(name="redis")])
    client = opened(house)
    house.put_below(client, EIGHT[:4], level=0)
    house.put_below(client, EIGHT[:4], level=1)
    client.publish(EIGHT[:2])
    flush(client, tier="host")
    assert (house.held_below(0), house.held_below(1)) == (set(), set(EIGHT[:4]))
    assert client.match(EIGHT[:2]) == 2
    assert flush(client, tier="pool").num_blocks == 2
    assert error_code(client.ask(requests.Flush, tier="nvme")) == "invalid-request"
    house.close()


def test_by_model_or_by_digest() -> None:
    house = TieredHouse(3)
    client, other = opened(house), opened(house, model="other")
    client.publish(EIGHT[:2])
    other.publish(names("x"))
    assert flush(client, model="other").num_blocks == 1
    assert flush(client, namespace=client.digest).num_blocks == 2
    assert flush(client, namespace=b"\1" * 32).num_blocks == 0, "one that only the tiers may know"
    assert error_code(client.ask(requests.Flush, namespace=b"short")) == "invalid-request"
    house.close()


def test_who_is_not_the_daemons_user_may_not_flush_what_others_share(house: TieredHouse) -> None:
    client = house.client(uid=1000)
    client.open()
    assert error_code(client.ask(requests.Flush)) == "permission-refused"
    assert error_code(client.ask(requests.Flush, namespace=client.digest)) == "permission-refused"
    assert error_code(client.ask(requests.Spill)) == "permission-refused"


def test_without_tiers_a_flush_empties_the_pool() -> None:
    house = House()
    client = house.client(uid=0)
    client.open()
    blocks = client.begin(EIGHT[:3]).reserved
    client.seal(blocks, EIGHT[:3])
    assert expect(Flushed, client.ask(requests.Flush)).num_blocks == 3
    assert client.match(EIGHT[:3]) == 0
    house.close()


def test_blocks_sealed_before_a_flushed_generation_was_known_are_dropped(house: TieredHouse) -> None:  # case A9
    house.tier.fail_always("generation", TierUnavailable("gone"))
    client = opened(house)
    client.publish(EIGHT[:4])
    house.below.flush(NamespaceDigest(client.digest))  # by another daemon, which can reach it
    house.tier.heal()
    house.pass_time(6.0)
    house.run_mover()
    assert client.match(EIGHT[:4]) == 0, "nobody can tell which was first"
    client.publish(EIGHT)
    house.run_mover()
    assert len(house.held_below()) == 4


def test_nor_do_nearer_tiers_keep_what_was_copied_meanwhile() -> None:  # case A9
    house = TieredHouse(tiers=[DictTier(name="host"), DictTier(name="redis")], spill="write_through")
    house.tiers[1].fail_always("generation", TierUnavailable("gone"))
    client = opened(house)
    client.publish(EIGHT[:4])
    house.run_mover(Spill)
    assert house.held_below(0) == set(EIGHT[:4])
    house.inner[1].flush(NamespaceDigest(client.digest))
    house.tiers[1].heal()
    house.pass_time(6.0)
    house.run_mover()
    assert not house.held_below(0)
    assert found(client) == 0
    house.close()


def test_what_only_a_tier_holds_is_flushed_by_model_or_with_all() -> None:  # case A9
    house = TieredHouse(tiers=[DictTier(name="host"), DictTier(name="redis")])
    client = opened(house)
    host, redis = house.inner
    unopened(redis)
    other, long = unopened(redis, model="other"), unopened(redis, model="m" * 5000)
    near = unopened(host)
    assert flush(client, model="model").num_namespaces == 3, "the one that is open, and one of each tier"
    assert (set(host.blocks), set(redis.blocks)) == (set(), {other, long})
    assert flush(client, model="m" * 5000).num_namespaces == 1
    assert set(redis.blocks) == {other}
    near = unopened(host)
    unopened(redis)
    flush(client, tier="redis")
    assert (set(host.blocks), set(redis.blocks)) == ({near}, set())
    unopened(redis)
    flush(client)
    assert (set(host.blocks), set(redis.blocks)) == (set(), set())
    house.close()


def test_pools_alone_ask_no_tier(house: TieredHouse) -> None:
    client = opened(house)
    unopened(house.below)
    assert flush(client, tier="pool").num_namespaces == 1
    assert house.below.blocks


def test_nobody_reaches_another_tenants_namespaces_below() -> None:
    house = TieredHouse(isolation="uid")
    client, admin = house.client(uid=1000), house.client(uid=0)
    mine, theirs = unopened(house.below, tenant="uid:1000"), unopened(house.below, tenant="uid:1001")
    unopened(house.below, tenant="gid:100")
    assert flush(client).num_namespaces == 1
    assert mine not in house.below.blocks
    assert theirs in house.below.blocks
    assert flush(client, model="model").num_namespaces == 1, "its own again"
    assert flush(admin).num_namespaces == 3
    assert not house.below.blocks
    house.close()


def test_a_tier_that_cannot_be_asked_what_it_holds_is_named(house: TieredHouse) -> None:
    client = opened(house)
    left = unopened(house.below)
    client.publish(EIGHT[:2])
    house.tier.fail_next("names", TierUnavailable("gone"))
    reply = flush(client)
    assert (reply.num_namespaces, reply.num_blocks, reply.untold, reply.unlisted) == (1, 2, [], ["redis"])
    assert left in house.below.blocks
    assert flush(client).unlisted == []
    assert left not in house.below.blocks


def test_a_namespace_and_a_model_at_once_are_refused(house: TieredHouse) -> None:
    client = opened(house)
    client.publish(EIGHT[:2])
    assert error_code(client.ask(requests.Flush, namespace=client.digest, model="model")) == "invalid-request"
    assert client.match(EIGHT[:2]) == 2


def test_what_is_opened_is_kept_with_its_name(house: TieredHouse) -> None:
    client = opened(house, model="named", adapter="adapter", engine="raw/1")
    (name,) = house.below.names()
    assert name == name_of(
        NamespaceDigest(client.digest), tenant="gid:100", model="named", engine="raw/1", adapter="adapter"
    )
