"""`cache.statistics()`: calls by what they found, tokens, and where the daemon finds blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvd_client
import kvd_client.aio
from kvd.errors import InvalidRequest
from tests.client.kv import LAYOUT, MODEL, fill
from tests.support.daemon import Daemon, running_daemon
from tests.support.wait import eventually

IDS = list(range(500, 570))


def open_cache(client: kvd_client.Client, **arguments: Any) -> kvd_client.Cache:
    return client.cache(model=MODEL, layout=LAYOUT, **arguments)


def ask(cache: kvd_client.Cache, ids: list[int]) -> None:
    cache.get_or_compute(ids, lambda seq: fill(seq, ids)).close()


def test_calls_and_tokens_are_counted(client: kvd_client.Client) -> None:
    cache = open_cache(client)
    assert cache.statistics().tokens.rate == 0.0
    ask(cache, IDS)
    ask(cache, IDS)
    ask(cache, IDS[:48])
    ask(cache, [*IDS[:40], 1, 2, 3, *IDS[43:]])
    ask(cache, IDS[:10])
    counted = cache.statistics()
    assert (counted.num_calls, counted.num_hits, counted.num_partial_hits, counted.num_misses) == (5, 2, 1, 2)
    assert counted.tokens.num_asked == 70 + 70 + 48 + 70 + 10
    assert counted.tokens.num_found == 0 + 64 + 32 + 32 + 0
    assert counted.tokens.rate == 128 / 268
    assert counted.computed_s > 0
    assert counted.num_failed == 0


def test_the_daemons_counts_are_everybodys_of_this_namespace(client: kvd_client.Client, daemon: Daemon) -> None:
    cache = open_cache(client)
    ask(cache, IDS)
    with kvd_client.connect(daemon.folder) as other:
        ask(open_cache(other), IDS)
        ask(open_cache(other, salt="another"), IDS)
        counted = open_cache(other).statistics()
    assert counted.num_calls == 0
    assert (counted.memory.num_asked, counted.memory.num_found) == (8, 4)
    assert counted.memory.rate == 0.5
    assert counted.tiers == {}


@pytest.mark.parametrize("fails", ["raises", "leaves tokens out"])
def test_a_computation_that_fails_is_counted(client: kvd_client.Client, fails: str) -> None:
    cache = open_cache(client)

    def compute(_seq: kvd_client.Sequence) -> None:
        if fails == "raises":
            raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, InvalidRequest)):
        cache.get_or_compute(IDS, compute)
    assert (cache.statistics().num_calls, cache.statistics().num_failed) == (1, 1)


async def test_the_twin_counts_as_well(daemon: Daemon) -> None:
    async def compute(seq: kvd_client.aio.Sequence) -> None:
        missing = torch.zeros(LAYOUT.num_kv_heads, len(IDS) - seq.num_cached_tokens, LAYOUT.head_dim).half()
        for layer in range(LAYOUT.num_layers):
            await seq.append(layer, missing, missing)

    async with kvd_client.aio.connect(daemon.folder) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT)
        for _ in range(2):
            await (await cache.get_or_compute(IDS, compute)).close()
        with pytest.raises(InvalidRequest):
            await cache.get_or_compute([*IDS, 1], lambda _: None)
        counted = await cache.statistics()
    assert (counted.num_calls, counted.num_hits, counted.num_misses, counted.num_failed) == (3, 2, 1, 1)
    assert counted.tokens.num_found == 128


def test_hits_by_tier(tmp_path: Any) -> None:
    """Spilled to the host tier, dropped from memory, and asked for again."""
    tiers = {"redis": {"url": ""}, "host": {"budget": 16 << 20}}
    with running_daemon(tmp_path, budget="8MiB", tiers=tiers) as daemon, kvd_client.connect(daemon.folder) as client:
        cache = open_cache(client)
        ask(cache, IDS)
        eventually(lambda: client.spill() == 0)
        client.flush(namespace=cache.digest, tier="pool")
        ask(cache, IDS)
        counted = cache.statistics()
    assert (counted.below.num_found, counted.tiers["host"].num_found) == (4, 4)
    assert 0 < counted.tiers["host"].rate <= 1
    assert counted.tokens.num_found == 64
