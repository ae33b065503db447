"""A cluster whose nodes die, and TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvd.block import NamespaceDigest
from kvd.errors import TierRefused, TierUnavailable
from kvd.tiers.base import Read, TierKey, Write
from kvd.tiers.redis_tier import RedisTier
from tests.support.clock import FakeClock
from tests.support.redis_servers import DEBIAN_REDIS, RealServer, reserved_ports, running_cluster, running_server
from tests.support.wait import eventually
from tests.tiers.conformance import empty, fetched, new_block, new_key, new_namespace
from tests.tiers.conftest import ConnectTier


def cluster_url(servers: list[RealServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def node_of(tier: RedisTier, key: TierKey) -> int:
    """The TCP port of the node that holds a block."""
    name = tier._keys.block(key, tier.generation(key.namespace))
    return tier._nodes.control.node_of(name).port


def test_blocks_are_spread_over_the_nodes(redis_cluster: list[RealServer], connect_tier: ConnectTier):
    tier, namespace = connect_tier(cluster_url(redis_cluster)), new_namespace()
    keys = [new_key(namespace) for _ in range(60)]
    assert {node_of(tier, key) for key in keys} == {server.port for server in redis_cluster}


def test_a_dead_node_costs_its_own_blocks_only(connect_tier: ConnectTier, clock: FakeClock):
    # case C1
    with running_cluster() as servers:
        tier = connect_tier(cluster_url(servers))
        dead = servers[1]
        namespace = namespace_off(tier, dead)
        generation = tier.generation(namespace)
        keys, data = [new_key(namespace) for _ in range(30)], new_block()
        assert tier.put_many([Write(key, data, generation) for key in keys]) == [None] * 30
        lost = [node_of(tier, key) == dead.port for key in keys]
        assert any(lost)
        orphaned = namespace_on(tier, dead)
        tier.generation(orphaned)
        orphans = [new_key(orphaned) for _ in range(30)]
        dead.kill()
        for _ in range(5):
            outcomes = tier.get_many([Read(key, empty()) for key in keys])
            assert [isinstance(one, TierUnavailable) for one in outcomes] == lost
        assert tier.contains(keys) == [not one for one in lost]
        assert tier.status().state == "up"
        # "Not told" is not "there is none": the generation on the dead node is not taken for lost.
        with pytest.raises(TierUnavailable):
            tier.contains(orphans)
        assert tier.take_flushed() == []
        dead.start()

        def all_stored() -> bool:
            clock.advance(60)
            return tier.put_many([Write(key, data, generation) for key in keys]) == [None] * 30

        eventually(all_stored)  # a node that comes back waits a little before it serves
        assert fetched(tier, keys[lost.index(True)]) == data


def test_a_slot_that_moved_is_found_in_its_new_place(connect_tier: ConnectTier):
    with running_cluster() as servers:
        tier = connect_tier(cluster_url(servers))
        source, target = servers[0], servers[1]
        namespace = namespace_off(tier, source)
        generation = tier.generation(namespace)
        key = next(key for key in iter(lambda: new_key(namespace), None) if node_of(tier, key) == source.port)
        name = tier._keys.block(key, generation)
        with source.client() as client:
            slot = client.execute_command("CLUSTER", "KEYSLOT", name)
        with target.client() as client:
            target_id = client.execute_command("CLUSTER", "MYID")
        for server in (target, source, servers[2]):
            with server.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        others = [new_key(namespace) for _ in range(5)]
        data = new_block()
        assert tier.put_many([Write(one, data, generation) for one in [key, *others]]) == [None] * 6
        with target.client() as client:
            assert client.exists(name) == 1
        assert fetched(tier, key) == data


def namespace_on(tier: RedisTier, server: RealServer) -> NamespaceDigest:
    """A namespace whose generation this node holds."""
    return next(one for one in iter(new_namespace, None) if record_port(tier, one) == server.port)


def record_port(tier: RedisTier, namespace: NamespaceDigest) -> int:
    return tier._nodes.control.node_of(tier._keys.generation(namespace)).port


def namespace_off(tier: RedisTier, server: RealServer) -> NamespaceDigest:
    """A namespace whose generation another node holds."""
    return next(one for one in iter(new_namespace, None) if record_port(tier, one) != server.port)


@pytest.mark.parametrize("cluster_first", [True, False])
def test_the_url_must_fit_the_server(redis_cluster, debian_redis, connect_tier: ConnectTier, cluster_first: bool):
    if cluster_first:
        url = redis_cluster[0].url
    else:
        with (
            reserved_ports(1) as (port,),
            running_server(DEBIAN_REDIS, port=port) as server,
            pytest.raises(TierRefused) as caught,
        ):
            connect_tier(cluster_url([server])).generation(new_namespace())
        assert caught.value.cause == "wrong-mode"
        return
    with pytest.raises(TierRefused) as caught:
        connect_tier(url).generation(new_namespace())
    assert caught.value.cause == "wrong-mode"
    assert "redis+cluster://" in str(caught.value)


def test_tls_carries_blocks_and_refuses_strangers(tmp_path: Path, connect_tier: ConnectTier):
    certificate, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=kvd-test -days 2"
    where = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key_file, "-out", certificate]
    subprocess.run(["openssl", *request.split(), *where], check=True, capture_output=True)
    tls = ["--tls-cert-file", certificate, "--tls-key-file", key_file, "--tls-ca-cert-file", certificate]
    tls += ["--tls-auth-clients", "no", "--tls-port"]
    with reserved_ports(1) as (port,), running_server(DEBIAN_REDIS, *map(str, [*tls, port])):
        tier = connect_tier(f"rediss://127.0.0.1:{port}?ca_file={certificate}")
        namespace = new_namespace()
        keys, data = [new_key(namespace) for _ in range(10)], new_block(1 << 20)
        generation = tier.generation(namespace)
        assert tier.put_many([Write(key, data, generation) for key in keys]) == [None] * 10
        assert fetched(tier, keys[3], 1 << 20) == data
        with pytest.raises(TierRefused) as caught:
            connect_tier(f"rediss://127.0.0.1:{port}").generation(namespace)
        assert caught.value.cause == "tls"
