"""Pools of their own: which caches get one, what differs there, and that one namespace in two pools stays one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.block import NamespaceDigest
from kvd.mover import Spill
from kvd.protocol import requests
from kvd.protocol.replies import Flushed
from kvd.service.pool_rules import PoolPolicy, PoolRules, Rule
from tests.service.harness import expect, names
from tests.service.tiers import TieredHouse

FOUR = names(*"abcd")
ALICE, BOB = 1000, 1001


def rule(name: str, spill: str = "on_evict", **conditions: object) -> Rule:
    return Rule(name=name, policy=PoolPolicy(spill=spill), **conditions)  # type: ignore[arg-type]


def test_the_first_rule_that_fits_in_every_condition_wins() -> None:
    rules = PoolRules(
        [
            rule("both", models=("llama*", "qwen?"), uids=frozenset({ALICE})),
            rule("engine", engines=("vllm/*",)),
            rule("model", models=("llama*",)),
        ]
    )

    def name(model: str, engine: str = "raw/1", uid: int = BOB) -> str:
        return rules.name_for(model=model, engine=engine, uid=uid)

    assert name("llama-3", uid=ALICE) == "both"
    assert name("qwen2", uid=ALICE) == "both"
    assert name("qwen25", uid=ALICE) == ""
    assert name("llama-3") == "model"
    assert name("llama-3", "vllm/1") == "engine"
    assert name("Llama-3") == "", "upper and lower case are told apart"
    assert name("my-llama") == "", "a pattern is about the whole text"
    assert name("llama\n3", uid=ALICE) == "both"
    assert PoolRules([rule("all")]).name_for(model="", engine="", uid=ALICE) == "all"


def test_a_policy_without_its_rule_is_the_default() -> None:
    rules = PoolRules([rule("a", "write_through")], PoolPolicy(spill="on_second_hit"))
    assert [rules.policy(name).spill for name in ("a", "", "gone")] == ["write_through", *["on_second_hit"] * 2]


@pytest.fixture
def house() -> Iterator[TieredHouse]:
    house = TieredHouse(
        4,
        rules=[
            rule("through", "write_through", models=("through*",)),
            rule("twice", "on_second_hit", models=("twice*",)),
            Rule(name="bobs", uids=frozenset({BOB})),
        ],
    )
    yield house
    house.check()
    house.close()


def test_each_pool_spills_by_its_own_rule(house: TieredHouse) -> None:
    through, twice, other = house.client(), house.client(), house.client()
    through.open(model="through/1")
    twice.open(model="twice/1")
    other.open(model="plain")
    assert len({client.pool for client in (through, twice, other)}) == 3
    assert [pool.name for pool in house.pools.pool_statuses()] == ["through", "twice", ""]
    for client, words in ((through, "abcd"), (twice, "efgh"), (other, "ijkl")):
        client.publish(names(*words))
    house.run_mover()
    assert house.held_below() == set(FOUR)
    for _ in range(2):
        for client, words in ((twice, "efgh"), (other, "ijkl")):
            client.release(client.begin(names(*words)).cached)
    house.run_mover()
    assert house.held_below() == set(names(*"abcdefgh"))


def test_a_reload_changes_what_pools_do_and_leaves_open_caches_where_they_are(house: TieredHouse) -> None:
    through, other = house.client(), house.client()
    through.open(model="through/1")
    other.open(model="plain")
    house.service.set_pool_rules(PoolRules([rule("plain", models=("plain",))], PoolPolicy(spill="write_through")))
    assert other.open(model="plain").pool == other.pool
    other.publish(FOUR)
    house.run_mover()
    assert house.held_below() == set(FOUR), "the pool without a name follows [tiers]"
    late = house.client()
    late.open(model="plain")
    assert late.pool not in {through.pool, other.pool}
    late.publish(names("x"))
    assert not house.mover.waiting(Spill)
    through.publish(names("y"))
    house.run_mover()
    assert names("y")[0] in house.held_below(), "its rule is gone"


def test_after_a_promotion_each_pool_keeps_or_drops_the_lower_copy() -> None:
    house = TieredHouse(4, rules=[Rule(name="drops", models=("drops",), policy=PoolPolicy(after_promote="drop"))])
    for model, words, left in (("drops", "ab", set()), ("keeps", "cd", set(names(*"cd")))):
        client = house.client()
        client.open(model=model)
        house.put_below(client, names(*words))
        assert client.try_begin(names(*words), wait_s=1.0) is None
        house.run_mover()
        assert house.held_below() & set(names(*words)) == left
    house.close()


def test_a_flush_reaches_every_pool_of_a_namespace(house: TieredHouse) -> None:  # case A9
    """Two users of one group, whose rules give them different pools."""
    alice, bob, admin = house.client(uid=ALICE), house.client(uid=BOB), house.client(uid=0)
    assert alice.open().pool != bob.open().pool
    assert alice.digest == bob.digest
    for client in (alice, bob):
        client.publish(FOUR)
        assert client.match(FOUR) == 4
    assert admin.ask(requests.Flush, model="model") is None
    house.run_mover()
    assert expect(Flushed, admin.answer()).num_blocks == 8
    assert [client.match(FOUR) for client in (alice, bob)] == [0, 0]


def test_a_flush_elsewhere_reaches_every_pool_of_a_namespace(house: TieredHouse) -> None:  # case A9
    alice, bob = house.client(uid=ALICE), house.client(uid=BOB)
    for client in (alice, bob):
        client.open()
        client.publish(FOUR)
    assert house.service.below is not None
    house.service.below.flushing.flushed_elsewhere(NamespaceDigest(alice.digest))
    house.run_mover()
    assert [client.match(FOUR) for client in (alice, bob)] == [0, 0]


def test_one_pool_that_knows_a_namespace_keeps_it_known(house: TieredHouse) -> None:
    alice, bob = house.client(uid=ALICE), house.client(uid=BOB)
    alice.open()
    bob.open()
    alice.publish(FOUR)
    assert house.pools.forget_namespaces(set()) == []
    assert house.pools.num_namespaces == 1
    house.pools.all[alice.pool].drop_namespaces([alice.digest])
    assert house.pools.forget_namespaces(set()) == [alice.digest]
