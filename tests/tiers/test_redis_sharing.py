"""Several daemons on one Redis, daemons that come back, and flushes that nobody may undo."""

from __future__ import annotations

import threading

import pytest

from kvd.block import NamespaceDigest
from kvd.errors import BlockMissing, StaleGeneration, TierUnavailable
from kvd.tiers.base import Read, Write
from kvd.tiers.names import encode_name, name_of
from kvd.tiers.redis_generations import with_name
from kvd.tiers.redis_tier import RedisTier
from kvd.tiers.resp_connection import Reply, RespConnection
from tests.support.clock import FakeClock
from tests.support.redis_servers import RealServer
from tests.support.wait import eventually
from tests.tiers.conformance import empty, fetched, new_block, new_key, new_namespace
from tests.tiers.conftest import ConnectTier


@pytest.fixture
def namespace() -> NamespaceDigest:
    return new_namespace()


@pytest.fixture
def two_daemons(server: RealServer, connect_tier: ConnectTier) -> tuple[RedisTier, RedisTier]:
    return connect_tier(server.url), connect_tier(server.url)


def test_a_restarted_daemon_finds_what_is_there(server: RealServer, connect_tier: ConnectTier, namespace):
    # case C5
    key, data = new_key(namespace), new_block()
    with connect_tier(server.url) as before:
        before.put(key, data, generation=before.generation(namespace))
    after = connect_tier(server.url)
    assert after.contains([key]) == [True]
    assert fetched(after, key) == data
    assert after.usage().num_blocks == 1  # case C6


def test_each_daemon_finds_what_the_other_stored(two_daemons, namespace):
    # case C8
    one, other = two_daemons
    assert one.generation(namespace) == other.generation(namespace)
    keys, data = [new_key(namespace) for _ in range(2)], new_block()
    for tier, key in zip(two_daemons, keys, strict=True):
        tier.put(key, data, generation=tier.generation(namespace))
    for tier in two_daemons:
        assert tier.contains(keys) == [True, True]
        assert tier.usage().num_blocks == 2
    one.close()
    assert other.contains(keys) == [True, True]


def test_daemons_that_start_together_agree_on_the_generation(two_daemons):
    # case C8
    for _ in range(20):
        namespace, found, start = new_namespace(), [], threading.Barrier(2)

        def learn(tier: RedisTier, namespace=namespace, found=found, start=start) -> None:
            start.wait(10)
            found.append(tier.generation(namespace))

        threads = [threading.Thread(target=learn, args=(tier,)) for tier in two_daemons]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(set(found)) == 1 == len(found) - 1


def test_prefixes_keep_daemons_apart(server: RealServer, connect_tier: ConnectTier, namespace):
    mine, theirs = connect_tier(server.url, prefix="mine:"), connect_tier(server.url, prefix="theirs:")
    key, data = new_key(namespace), new_block()
    mine.put(key, data, generation=mine.generation(namespace))
    assert theirs.contains([key]) == [False]
    assert (mine.usage().num_blocks, theirs.usage().num_blocks) == (1, 0)
    theirs.flush(namespace)
    assert fetched(mine, key) == data


def test_a_flush_by_one_daemon_ends_it_for_all(two_daemons, namespace):
    # case A9
    one, other = two_daemons
    keys = [new_key(namespace) for _ in range(3)]
    old = other.generation(namespace)
    other.put_many([Write(key, new_block(), old) for key in keys[:2]])
    new = one.flush(namespace)
    assert other.contains(keys) == [False] * 3
    assert other.take_flushed() == [namespace]
    assert other.take_flushed() == []
    assert one.take_flushed() == []
    with pytest.raises(StaleGeneration):
        other.put(keys[2], new_block(), generation=old)
    assert other.generation(namespace) == new
    assert one.usage().num_blocks == 0


def test_what_was_stored_after_a_flush_elsewhere_is_found_at_once(two_daemons, namespace):
    # case C8
    one, other = two_daemons
    key = new_key(namespace)
    other.generation(namespace)
    one.put(key, new_block(), generation=one.flush(namespace))
    assert other.contains([key]) == [True]


def test_a_block_known_to_be_stale_is_not_even_sent(server: RealServer, connect_tier: ConnectTier, namespace):
    tier = connect_tier(server.url)
    old = tier.generation(namespace)
    tier.flush(namespace)
    with server.client() as client:
        before = client.info("commandstats")["cmdstat_set"]["calls"]
        with pytest.raises(StaleGeneration):
            tier.put(new_key(namespace), new_block(), generation=old)
        assert client.info("commandstats")["cmdstat_set"]["calls"] == before


@pytest.mark.parametrize("call", ["get", "put"])
def test_what_was_not_confirmed_to_be_of_this_generation_did_not_happen(
    server: RealServer, connect_tier: ConnectTier, namespace, call: str, monkeypatch: pytest.MonkeyPatch
):
    # case A9: the connection ends after the value, before the generation.
    tier = connect_tier(server.url)
    key, data, generation = new_key(namespace), new_block(), tier.generation(namespace)
    tier.put(key, data, generation=generation)
    read_reply = RespConnection.read_reply

    def cut(self: RespConnection) -> Reply:
        reply = read_reply(self)
        if isinstance(reply, bytes) and reply.startswith(b"created:"):
            raise ConnectionResetError("cut")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(RespConnection, "read_reply", cut)
        if call == "get":
            (outcome,) = tier.get_many([Read(key, empty())])
        else:
            (outcome,) = tier.put_many([Write(new_key(namespace), data, generation)])
        assert isinstance(outcome, TierUnavailable)
    assert fetched(tier, key) == data


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_flush_elsewhere_is_noticed_by_the_call_it_meets(two_daemons, namespace, call: str):
    # case A9
    one, other = two_daemons
    key, late = new_key(namespace), new_key(namespace)
    old = other.generation(namespace)
    other.put(key, new_block(), generation=old)
    one.flush(namespace)
    if call == "get":
        with pytest.raises(BlockMissing):
            other.get(key, empty())
    else:
        with pytest.raises(StaleGeneration) as caught:
            other.put(late, new_block(), generation=old)
        assert caught.value.cause == "flushed"
    assert other.take_flushed() == [namespace]
    assert one.contains([key, late]) == [False, False]
    assert one.usage().num_blocks == 0


def test_a_late_spill_of_the_old_generation_cannot_be_read_even_if_it_lands(two_daemons, server, namespace):
    # case A9: the worst order. The value arrives after the flush and its sweep, and nobody is left to delete it.
    one, other = two_daemons
    key, data = new_key(namespace), new_block()
    old = other.generation(namespace)
    other.put(key, data, generation=old)
    with server.client() as client:
        (name,) = client.keys("*v:*")
        value = client.get(name)
        one.flush(namespace)
        client.set(name, value)
    for tier in two_daemons:
        assert tier.contains([key]) == [False]
        with pytest.raises(BlockMissing):
            tier.get(key, empty())


def test_a_flush_that_redis_could_not_hear_is_done_before_anything_else(
    server: RealServer, two_daemons, clock: FakeClock, namespace
):
    # case A9
    one, other = two_daemons
    key, data = new_key(namespace), new_block()
    old = one.generation(namespace)
    one.put(key, data, generation=old)
    server.freeze()
    try:
        with pytest.raises(TierUnavailable):
            one.flush(namespace)
    finally:
        server.thaw()
    clock.advance(60)
    with pytest.raises(BlockMissing):
        one.get(key, empty())
    with pytest.raises(StaleGeneration) as caught:
        one.put(key, data, generation=old)
    assert caught.value.cause == "flushed"
    assert other.contains([key]) == [False]


def test_a_generation_that_was_evicted_never_comes_back(server: RealServer, two_daemons, namespace):
    # case A9: a counter that begins again at 0 would bring the blocks of before the flush back.
    one, other = two_daemons
    key, data = new_key(namespace), new_block()
    one.put(key, data, generation=one.generation(namespace))
    with server.client() as client:
        (name,) = client.keys("*v:*")
        value = client.get(name)
        one.flush(namespace)
        client.set(name, value)
        client.delete(*client.keys("*g:*"))
    other.generation(namespace)
    for tier in two_daemons:
        assert tier.contains([key]) == [False]


def test_a_daemon_lists_what_another_one_named(server: RealServer, connect_tier: ConnectTier, namespace):
    # case A9
    name = name_of(namespace, tenant="gid:1", model="model")
    prefix = f"names{namespace.hex()[:8]}:"
    with connect_tier(server.url, prefix=prefix) as before:
        before.put(new_key(namespace), new_block(), generation=before.generation(namespace, name))
    after = connect_tier(server.url, prefix=prefix)
    with server.client() as client:
        # Of before names were kept; of nobody; and one that would have another namespace flushed.
        client.set(f"{prefix}g:{'1' * 32}", "created:0123456789abcdef")
        client.set(f"{prefix}g:{'2' * 32}", "nonsense")
        client.set(f"{prefix}g:{'3' * 32}", b"created:0123456789abcdef " + encode_name(name))
        client.set(f"{prefix}g:{'4' * 32}", b"created:0123456789abcdef {}")
        client.rpush(f"{prefix}g:{'5' * 32}", "a list")
    assert after.names() == [name]
    assert connect_tier(server.url).names() == []


def test_a_long_value_in_a_record_s_place_is_no_fault_of_the_tier(
    server: RealServer, connect_tier: ConnectTier, namespace
):
    tier = connect_tier(server.url, prefix=f"long{namespace.hex()[:8]}:")
    with server.client() as client:
        client.set(tier._keys.generation(namespace), b"x" * 100_000)
    key, data = new_key(namespace), new_block()
    tier.put(key, data, generation=tier.generation(namespace))
    assert fetched(tier, key) == data
    assert tier.status().state == "up"


def test_naming_a_generation_never_brings_it_back(server: RealServer, two_daemons, namespace):
    # case A9: one daemon reads the record, another flushes, the first writes what it read with the name added.
    one, other = two_daemons
    old, name = one.generation(namespace), name_of(namespace, tenant="gid:1", model="model")
    new = []

    def flushed_meanwhile(record: object) -> bytes | None:
        if not new:
            new.append(other.flush(namespace))
        return with_name(record, name)

    one._nodes.control.amend(one._keys.generation(namespace), flushed_meanwhile)
    assert one.generation(namespace) == new[0] != old
    assert one.generation(namespace, name) == new[0]
    assert one.was_flushed(namespace)
    assert name in other.names()


def test_blocks_expire_and_their_usage_with_them(server: RealServer, connect_tier: ConnectTier, namespace):
    # case C6
    tier = connect_tier(server.url, ttl_s=1)
    key = new_key(namespace)
    tier.put(key, new_block(), generation=tier.generation(namespace))
    assert tier.usage().num_blocks == 1
    eventually(lambda: tier.contains([key]) == [False])
    usage = tier.usage()
    assert (usage.num_blocks, usage.used_nbytes) == (0, 0)


def test_every_key_has_a_time_to_live_counted_from_its_last_use(server: RealServer, connect_tier, namespace):
    tier = connect_tier(server.url, ttl_s=500)
    key = new_key(namespace)
    tier.put(key, new_block(), generation=tier.generation(namespace))
    with server.client() as client:
        (value,), (record,) = client.keys("*v:*"), client.keys("*g:*")
        assert 0 < client.ttl(value) <= 500 < client.ttl(record)
        for name in (value, record):
            client.expire(name, 100)
        tier.get_many([Read(key, empty())])
        assert 100 < client.ttl(value) <= 500 < client.ttl(record)
