"""A Redis absent, killed, frozen, full, locked or full of nonsense: a miss or an error, counted, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvd.block import NamespaceDigest
from kvd.errors import BlockCorrupt, BlockMissing, StaleGeneration, TierFull, TierRefused, TierUnavailable
from kvd.tiers.base import Generation, Read, TierKey, Write
from kvd.tiers.redis_bulk import WINDOW
from kvd.tiers.redis_tier import RedisOptions, RedisTier
from kvd.tiers.redis_url import parse_redis_url
from tests.support.clock import FakeClock
from tests.support.redis_servers import DEBIAN_REDIS, RealServer, running_server
from tests.tiers.conformance import empty, fetched, new_block, new_key, new_namespace
from tests.tiers.conftest import ConnectTier

SLACK_S = 3.0
"""On top of a time-out: what a busy machine may add before a test calls it a hang."""


@pytest.fixture
def namespace() -> NamespaceDigest:
    return new_namespace()


@pytest.fixture
def timeout_s() -> float:
    """A server that answers at all never reaches it, however busy the machine; a test of a frozen one takes another."""
    return 30.0


@pytest.fixture
def tier(server: RealServer, connect_tier: ConnectTier, timeout_s: float) -> RedisTier:
    return connect_tier(server.url, control_timeout_s=timeout_s, bulk_timeout_s=timeout_s)


@pytest.fixture
def stored(tier: RedisTier, namespace: NamespaceDigest) -> tuple[TierKey, memoryview, Generation]:
    """One block that is in Redis."""
    key, data, generation = new_key(namespace), new_block(), tier.generation(namespace)
    tier.put(key, data, generation=generation)
    return key, data, generation


def the_value(server: RealServer) -> tuple[bytes, bytes]:
    """Name and bytes of the only block there."""
    with server.client() as client:
        (name,) = client.keys("*v:*")
        return name, client.get(name)


def replace(server: RealServer, change: Callable[[bytes], bytes]) -> None:
    name, value = the_value(server)
    with server.client() as client:
        client.set(name, change(value))


def test_absent_at_start_then_there(server: RealServer, connect_tier: ConnectTier, clock: FakeClock, namespace):
    # case C1
    server.kill()
    tier = connect_tier(server.url)
    for _ in range(3):
        with pytest.raises(TierUnavailable) as caught:
            tier.generation(namespace)
    assert caught.value.cause == "refused"
    assert str(server.socket_path) in str(caught.value)
    with pytest.raises(TierUnavailable) as caught:
        tier.generation(namespace)
    assert caught.value.cause == "refused-waiting"
    status = tier.status()
    assert (status.state, status.errors) == ("down", {"refused": 3, "refused-waiting": 1})
    assert status.reason
    server.start()
    clock.advance(status.retry_in_s)
    key, data = new_key(namespace), new_block()
    tier.put(key, data, generation=tier.generation(namespace))
    assert fetched(tier, key) == data
    assert tier.status().state == "up"


def test_killed_and_restarted_empty(server: RealServer, tier: RedisTier, namespace, stored):
    # case C1
    key, data, generation = stored
    server.kill()
    assert isinstance(tier.get_many([Read(key, empty())])[0], TierUnavailable)
    server.start()
    assert tier.contains([key]) == [False]
    with pytest.raises(BlockMissing):
        tier.get(key, empty())
    with pytest.raises(StaleGeneration) as caught:
        tier.put(key, data, generation=generation)
    assert caught.value.cause == "generation-lost"
    assert tier.take_flushed() == []
    tier.put(key, data, generation=tier.generation(namespace))
    assert fetched(tier, key) == data


def test_a_restart_between_two_calls_is_not_even_a_failure(server: RealServer, tier: RedisTier, stored):
    # case C1
    server.kill()
    server.start()
    with pytest.raises(BlockMissing):
        tier.get(stored[0], empty())
    assert tier.status().errors == {}


@pytest.mark.parametrize("timeout_s", [1.0])
def test_a_frozen_server_costs_one_time_out_then_nothing(
    server: RealServer, tier: RedisTier, timeout_s: float, clock: FakeClock, namespace, stored
):
    # case C1
    key, data, generation = stored
    calls: list[Callable[[], object]] = [
        lambda: tier.get(key, empty()),
        lambda: tier.put(key, new_block(2 << 20), generation=generation),
        lambda: tier.contains([key]),
    ]
    server.freeze()
    try:
        for call in calls:
            started_s = time.monotonic()
            with pytest.raises(TierUnavailable) as caught:
                call()
            assert caught.value.cause == "timeout"
            assert time.monotonic() - started_s < timeout_s + 0.3 + SLACK_S
        with pytest.raises(TierUnavailable) as caught:
            tier.contains([key])
        assert caught.value.cause == "timeout-waiting"
        assert tier.status().state == "down"
    finally:
        server.thaw()
    clock.advance(60)
    assert fetched(tier, key) == data
    assert tier.status().state == "up"


def test_killed_in_the_middle_of_a_value(server: RealServer, tier: RedisTier, namespace, stored):
    # case C1
    keys, generation = [new_key(namespace) for _ in range(4)], stored[2]
    tier.put_many([Write(key, new_block(4 << 20), generation) for key in keys])
    server.freeze()
    # The kernel hangs up on a killed server's socket even while the answer is awaited.
    server.kill()
    outcomes = tier.get_many([Read(key, empty(4 << 20)) for key in keys])
    assert all(isinstance(one, TierUnavailable) for one in outcomes)
    server.start()
    assert tier.contains(keys) == [False] * 4


def test_full_and_never_evicting(connect_tier: ConnectTier, clock: FakeClock, namespace):
    # case C1
    with running_server(DEBIAN_REDIS, "--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as server:
        tier = connect_tier(server.url)
        generation = tier.generation(namespace)
        keys, data = [new_key(namespace) for _ in range(30)], new_block(2 << 20)
        outcomes = tier.put_many([Write(key, data, generation) for key in keys])
        num_stored = outcomes.index(next(one for one in outcomes if one is not None))
        assert 2 < num_stored < 12
        assert all(isinstance(one, TierFull) for one in outcomes[num_stored:])
        assert tier.contains(keys) == [index < num_stored for index in range(30)]
        assert fetched(tier, keys[0], 2 << 20) == data
        with server.client() as client:
            refused = client.info("commandstats")["cmdstat_set"]["rejected_calls"]
        assert 0 < refused <= WINDOW  # the rest was not even sent
        with pytest.raises(TierFull) as caught:
            tier.put(keys[-1], data, generation=generation)
        assert caught.value.cause == "full-waiting"
        assert "maxmemory" in tier.status().details["writes"]
        assert tier.status().state == "up"
        tier.delete(keys[:num_stored])
        clock.advance(10)
        tier.put(keys[-1], data, generation=generation)
        assert tier.contains(keys[-1:]) == [True]
        assert tier.status().errors.keys() == {"full", "full-waiting"}


@pytest.mark.parametrize("password", ["", "wrong"])
def test_wrong_password(clock: FakeClock, namespace, password: str, timeout_s: float):
    # case C1
    with running_server(DEBIAN_REDIS, "--requirepass", "right") as server:
        environ = {"KVD_REDIS_PASSWORD": password} if password else {}
        address = parse_redis_url(server.url, environ)
        assert "wrong" not in str(address) + repr(address)
        options = RedisOptions(control_timeout_s=timeout_s, bulk_timeout_s=timeout_s)
        with RedisTier(address, options, clock=clock) as tier:
            with pytest.raises(TierRefused) as caught:
                tier.generation(namespace)
            assert caught.value.cause == "auth"
            assert "password" in str(caught.value)
            assert tier.status().state == "down"
            assert "wrong" not in repr(tier.status())
        with RedisTier(parse_redis_url(server.url, {"KVD_REDIS_PASSWORD": "right"}), options) as tier:
            key, data = new_key(namespace), new_block()
            tier.put(key, data, generation=tier.generation(namespace))
            assert fetched(tier, key) == data


def test_deleted_between_contains_and_get(server: RealServer, tier: RedisTier, stored):
    # case C1
    assert tier.contains([stored[0]]) == [True]
    with server.client() as client:
        client.delete(the_value(server)[0])
    with pytest.raises(BlockMissing):
        tier.get(stored[0], empty())
    assert tier.status().errors == {}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        pytest.param(lambda value: value[:-1], "bad-length", id="cut by one byte"),
        pytest.param(lambda value: value[:64], "bad-length", id="only a header"),
        pytest.param(lambda value: value[:10], "bad-length", id="not even a header"),
        pytest.param(lambda value: b"", "bad-length", id="empty"),
        pytest.param(lambda value: value + b"x", "bad-length", id="one byte more"),
        pytest.param(
            lambda value: value[:1000] + bytes([value[1000] ^ 1]) + value[1001:], "bad-checksum", id="bit flip"
        ),
        pytest.param(lambda value: value[:60] + b"\0" + value[61:], "bad-checksum", id="checksum"),
        pytest.param(lambda value: value[:4] + b"\1" + value[5:], "bad-checksum", id="codec"),
        pytest.param(lambda value: value[:5] + b"\2" + value[6:], "bad-checksum", id="shuffle"),
        pytest.param(lambda value: value[:3] + b"\x09" + value[4:], "bad-version", id="version"),
        pytest.param(lambda value: value[:6] + b"other!" + value[12:], "wrong-block", id="namespace"),
        pytest.param(lambda value: value[:16] + bytes(32) + value[48:], "wrong-block", id="chain hash"),
        pytest.param(lambda value: value[:12] + b"\0\0\0\1" + value[16:], "bad-length", id="raw length"),
        pytest.param(lambda value: b"<html>" * 2000, "foreign-value", id="foreign"),
        pytest.param(lambda value: bytes(100 << 20), "foreign-value", id="foreign and huge"),
    ],
)
def test_a_damaged_value_is_a_miss_counted_and_deleted(
    server: RealServer, tier: RedisTier, namespace, stored, change: Callable[[bytes], bytes], cause: str
):
    # case C1
    key, data, generation = stored
    replace(server, change)
    healthy = new_key(namespace)
    tier.put(healthy, data, generation=generation)
    target = empty()
    outcomes = tier.get_many([Read(key, empty()), Read(healthy, target)])
    assert isinstance(outcomes[0], BlockCorrupt)
    assert (outcomes[0].cause, outcomes[1]) == (cause, None)
    assert target == data
    assert tier.contains([key]) == [False]
    status = tier.status()
    assert (status.errors, status.num_misses, status.num_hits) == ({cause: 1}, 1, 1)
    tier.put(key, data, generation=generation)
    assert fetched(tier, key) == data


def test_a_key_of_another_type_under_our_name(server: RealServer, tier: RedisTier, stored):
    # case C1
    name, _ = the_value(server)
    with server.client() as client:
        client.delete(name)
        client.hset(name, "field", "value")
    assert tier.usage().num_blocks == 0
    with pytest.raises(BlockCorrupt) as caught:
        tier.get(stored[0], empty())
    assert caught.value.cause == "foreign-value"
    assert tier.contains([stored[0]]) == [False]


@pytest.mark.parametrize("kind", ["text", "list"])
def test_nonsense_in_place_of_the_generation_only_forgets(server: RealServer, tier: RedisTier, namespace, stored, kind):
    key, data, generation = stored
    with server.client() as client:
        (name,) = client.keys("*g:*")
        client.delete(name)
        client.set(name, "nonsense") if kind == "text" else client.rpush(name, "nonsense")
    with pytest.raises(BlockMissing):
        tier.get(key, empty())
    fresh = tier.generation(namespace)
    assert fresh != generation
    assert tier.take_flushed() == []
    tier.put(key, data, generation=fresh)
    assert fetched(tier, key) == data


def test_generations_are_asked_for_in_one_round_trip(server: RealServer, tier: RedisTier, monkeypatch):
    spaces = [new_namespace() for _ in range(20)]
    known = [tier.generation(one) for one in spaces[:-1]]
    round_trips = []
    ask_each, run = tier._nodes.ask_each, tier._nodes.control.run
    monkeypatch.setattr(tier._nodes, "ask_each", lambda asked: round_trips.append(len(asked)) or ask_each(asked))
    monkeypatch.setattr(tier._nodes.control, "run", lambda asked: round_trips.append(len(asked)) or run(asked))
    assert tier.generations(spaces[:-1]) == known
    assert round_trips == [19]
    (*same, made) = tier.generations(spaces)
    assert same == known
    assert made == tier.generation(spaces[-1])


def test_a_user_without_rights(server: RealServer, connect_tier: ConnectTier, namespace):
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "kvd", "on", ">secret", "+@read", "+info", "-@write", "~*")
    tier = connect_tier(f"unix://kvd:secret@{server.socket_path}")
    with pytest.raises(TierRefused) as caught:
        tier.generation(namespace)
    assert caught.value.cause == "no-permission"
    assert "getex" in str(caught.value)


def test_a_replica_that_takes_no_writes(server: RealServer, connect_tier: ConnectTier, namespace):
    with running_server(DEBIAN_REDIS, "--replicaof", "127.0.0.1 1", "--replica-serve-stale-data", "yes") as replica:
        with pytest.raises(TierUnavailable) as caught:
            connect_tier(replica.url).generation(namespace)
        assert caught.value.cause == "read-only"
