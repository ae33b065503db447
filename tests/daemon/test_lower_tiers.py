"""A real daemon above a real Redis: what was computed yesterday, by another daemon, or before a restart is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvd_client
from kvd.layout import KVLayout
from kvd.protocol.requests import Flush
from kvd.status import Snapshot
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.support.daemon import Daemon, running_daemon
from tests.support.raw_client import RawClient
from tests.support.redis_servers import DEBIAN_REDIS, RealServer, running_server
from tests.support.stopwatch import Stopwatch
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("either_home")
PROMPT = list(range(1, 162))
NUM_CACHED = 160


@pytest.fixture
def server() -> Iterator[RealServer]:
    with running_server() as server:
        yield server


def tiers(server: RealServer, **more: Any) -> dict[str, Any]:
    return {"redis": {"url": server.url}, **more}


def compute(daemon: Daemon, token_ids: list[int], layout: KVLayout = LAYOUT) -> int:
    """Publishes a prompt; how many of its tokens were there already, checked number by number."""
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=layout)
        with cache.sequence(token_ids) as seq:
            num_cached = seq.num_cached_tokens
            assert holds(seq, token_ids, num_cached)
            fill(seq, token_ids)
            seq.commit()
    return num_cached


def num_spilled(daemon: Daemon) -> int:
    mover = snapshot(daemon).mover
    assert mover is not None
    return mover.counters["spilled"]


def snapshot(daemon: Daemon) -> Snapshot:
    with kvd_client.connect(daemon.folder) as client:
        return client.status()


def test_a_restarted_daemon_finds_what_it_copied_down_at_its_stop(  # case C5
    tmp_path: Path, server: RealServer
) -> None:
    with running_daemon(tmp_path, tiers=tiers(server)) as daemon:
        assert compute(daemon, PROMPT) == 0
    with running_daemon(tmp_path, tiers=tiers(server)) as daemon:
        assert compute(daemon, PROMPT) == NUM_CACHED
        status = snapshot(daemon)
        assert status.mover is not None
        assert status.mover.counters["promoted"] == NUM_CACHED // LAYOUT.block_tokens
        (tier,) = status.tiers
        assert (tier.state, tier.num_hits) == ("up", NUM_CACHED // LAYOUT.block_tokens)


def test_two_daemons_share_one_redis(tmp_path: Path, server: RealServer) -> None:  # case C8
    shared = tiers(server, spill="write_through")
    other_prompt = [*PROMPT[:80], *range(900, 981)]
    with (
        running_daemon(tmp_path, name="one", tiers=shared) as one,
        running_daemon(tmp_path, name="two", tiers=shared) as two,
    ):
        assert compute(one, PROMPT) == 0
        eventually(lambda: num_spilled(one) == 10)
        assert compute(two, other_prompt) == 80
        eventually(lambda: num_spilled(two) == 5)
        assert compute(one, other_prompt) == NUM_CACHED
        assert compute(two, PROMPT) == NUM_CACHED


def test_a_frozen_redis_costs_a_begin_less_than_a_tenth_of_a_second(  # case C1
    tmp_path: Path, server: RealServer
) -> None:
    with running_daemon(tmp_path, tiers=tiers(server)) as daemon, kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        server.freeze()
        slowest_s = 0.0
        for number in range(12):
            watch = Stopwatch(daemon.pid)
            with cache.sequence([number, *PROMPT]) as seq:
                slowest_s = max(slowest_s, watch.elapsed_s())
                assert seq.num_cached_tokens == 0
        assert slowest_s < 0.15  # the bound is 0.1; the rest is this machine's
        (tier,) = client.status().tiers
        assert tier.state != "up"
        assert client.status().warnings
        server.thaw()
        eventually(lambda: (compute(daemon, [7, 7, *PROMPT]), client.status().tiers[0].state == "up")[1])


def test_a_pool_smaller_than_the_working_set_loses_nothing(tmp_path: Path, server: RealServer) -> None:  # case C2
    prompts = [[number, *PROMPT] for number in range(40)]  # 400 blocks of 24 KiB, in a pool of 170
    with running_daemon(
        tmp_path, budget="4MiB", segment="1MiB", tiers=tiers(server, low_watermark=0.4, high_watermark=0.6)
    ) as daemon:
        for prompt in prompts:
            compute(daemon, prompt)
            # The next one is computed far faster here than any model could; let the copies keep up.
            eventually(lambda: snapshot(daemon).mover.queued["spill"] == 0)  # type: ignore[union-attr]
        found = [compute(daemon, prompt) for prompt in prompts]
        assert sum(found) >= 0.9 * NUM_CACHED * len(prompts)
        with kvd_client.connect(daemon.folder) as client:
            client.check()


def test_a_stop_with_redis_gone_is_still_a_clean_one(tmp_path: Path, server: RealServer) -> None:
    with running_daemon(tmp_path, tiers=tiers(server)) as daemon:
        compute(daemon, PROMPT)
        server.kill()


def test_a_redis_that_comes_back_empty_is_filled_again(tmp_path: Path, server: RealServer) -> None:  # case C1
    with running_daemon(tmp_path, tiers=tiers(server, spill="write_through")) as daemon:
        compute(daemon, PROMPT)
        eventually(lambda: num_spilled(daemon) == 10)
        server.kill()
        compute(daemon, [5, *PROMPT])
        eventually(lambda: snapshot(daemon).tiers[0].state != "up")
        assert snapshot(daemon).warnings
        server.start()
        eventually(lambda: num_spilled(daemon) > 10 or compute(daemon, [6, *PROMPT]) < 0, 30)
        assert snapshot(daemon).tiers[0].state == "up"


def test_a_full_redis_is_counted_and_memory_serves(tmp_path: Path) -> None:  # case C1, C3
    with (
        running_server(DEBIAN_REDIS, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server,
        running_daemon(tmp_path, tiers=tiers(server, spill="write_through")) as daemon,
    ):
        for number in range(20):
            compute(daemon, [number, *PROMPT])
        eventually(lambda: snapshot(daemon).tiers[0].errors)
        assert compute(daemon, [3, *PROMPT]) == NUM_CACHED
        with kvd_client.connect(daemon.folder) as client:
            client.check()


def test_a_flush_by_one_daemon_is_final_for_the_other(tmp_path: Path, server: RealServer) -> None:  # case A9
    shared = tiers(server, spill="write_through")
    with (
        running_daemon(tmp_path, name="one", tiers=shared) as one,
        running_daemon(tmp_path, name="two", tiers=shared) as two,
    ):
        compute(one, PROMPT)
        eventually(lambda: num_spilled(one) == 10)
        assert compute(two, PROMPT) == NUM_CACHED
        with RawClient(two.folder) as raw:
            assert raw.ask(Flush, model=MODEL).num_namespaces == 1
        assert compute(two, [*PROMPT[:16], 7, *range(50)]) == 0
        # The other hears of it by asking now and then, and then has nothing of before in any tier.
        eventually(lambda: snapshot(one).namespaces[0].counters["flushed"] > 0, 20)
        with kvd_client.connect(one.folder) as client:
            assert client.cache(model=MODEL, layout=LAYOUT).match(PROMPT) <= 16


def test_models_of_two_sizes_share_memory_and_redis(tmp_path: Path, server: RealServer) -> None:  # case D5
    large = KVLayout(num_layers=6, num_kv_heads=4, head_dim=64, block_tokens=16)
    with running_daemon(tmp_path, budget="12MiB", segment="2MiB", tiers=tiers(server, low_watermark=0.4)) as daemon:
        prompts = [[number, *PROMPT] for number in range(14)]
        for _ in range(2):
            for prompt in prompts:
                compute(daemon, prompt)
                compute(daemon, prompt, large)
        with kvd_client.connect(daemon.folder) as client:
            client.check()
        assert sum(one.counters["segments_dropped"] for one in snapshot(daemon).pools) > 0
