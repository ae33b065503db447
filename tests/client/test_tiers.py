"""What a client can ask about the tiers below, blocking and asyncio."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvd_client
import kvd_client.aio
from kvd.errors import InvalidRequest
from kvd_client.core.tier_verbs import Reach
from tests.client.kv import LAYOUT, MODEL, fill
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import running_server
from tests.support.wait import eventually

PROMPT = list(range(1, 82))
NUM_CACHED = 80


@pytest.fixture
def daemon(tmp_path, home) -> Iterator[Daemon]:
    tiers = {"host": {"budget": 4 << 20}, "redis": {"url": ""}}
    with running_daemon(tmp_path, tiers=tiers, machine=home) as daemon:
        yield daemon


def publish(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()


def copy_down(client: kvd_client.Client) -> None:
    eventually(lambda: client.spill() == 0)


def test_a_prefix_reaches_as_far_as_the_tiers_know_it(daemon):
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        assert cache.reach(PROMPT) == Reach(0, {"host": 0})
        publish(cache)
        copy_down(client)
        outcome = client.flush(namespace=cache.digest, tier="pool")
        assert (outcome.num_namespaces, outcome.num_blocks, outcome.untold) == (1, NUM_CACHED // 16, ())
        reach = cache.reach([*PROMPT[:40], 9, 9, 9])
        assert (reach.num_resident, reach.by_tier) == (0, {"host": 32})
        assert client.reach(cache.digest, LAYOUT.block_tokens, [*PROMPT[:40], 9, 9, 9]) == reach
        assert cache.match(PROMPT) == 0, "asking brings nothing up"


def test_a_prefetched_prefix_comes_up_by_itself(daemon):
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        publish(cache)
        copy_down(client)
        client.flush(model=MODEL, tier="pool")
        cache.prefetch(PROMPT)
        eventually(lambda: cache.match(PROMPT) == NUM_CACHED)


def test_a_flush_is_final(daemon):  # case A9
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        publish(cache)
        copy_down(client)
        client.flush(model=MODEL)
        with cache.sequence(PROMPT, wait_s=1) as seq:
            assert seq.num_cached_tokens == 0
        with pytest.raises(InvalidRequest, match="there is no tier"):
            client.flush(tier="tape")


async def test_the_asyncio_twin_asks_the_same(daemon):
    with kvd_client.connect(daemon.folder) as blocking:
        publish(blocking.cache(model=MODEL, layout=LAYOUT))
    async with kvd_client.aio.connect(daemon.folder) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT)
        assert (await cache.reach(PROMPT)).num_resident == NUM_CACHED
        while await client.spill():
            pass
        assert (await client.flush(namespace=cache.digest, tier="pool")).num_blocks == NUM_CACHED // 16
        await cache.prefetch(PROMPT)
        async with await cache.sequence(PROMPT, wait_s=5) as seq:
            assert seq.num_cached_tokens == NUM_CACHED


def test_without_tiers_the_prefix_reaches_as_far_as_memory(tmp_path):
    with running_daemon(tmp_path) as daemon, kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        publish(cache)
        cache.prefetch(PROMPT)
        assert cache.reach(PROMPT) == Reach(NUM_CACHED, {})
        assert client.spill() == NUM_CACHED // 16


def test_external_redis_is_one_more_tier(tmp_path):
    with running_server() as server:
        tiers = {"host": {"budget": 4 << 20}, "redis": {"url": server.url}, "drain_s": 0.0}
        with running_daemon(tmp_path, tiers=tiers) as daemon, kvd_client.connect(daemon.folder) as client:
            assert list(client.cache(model=MODEL, layout=LAYOUT).reach(PROMPT).by_tier) == ["host", "redis"]
