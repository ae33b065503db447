"""A pool that is too small for what is asked of it, above a real Redis: blocks are reused, refused, dropped, kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvd_client
from kvd.errors import OutOfBlocks
from kvd.status import PoolStatus
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import DEBIAN_REDIS, VALKEY, RealServer, running_server
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("either_home")
PROMPT = list(range(1, 162))
NUM_CACHED = 160
NUM_BLOCKS = 10
CAPACITY = (2 << 20) // LAYOUT.block_nbytes
"""Of a pool of one segment, as small as a card's may be: 85."""
NUM_FITTING = CAPACITY // NUM_BLOCKS
"""Prompts that lie in it at a time."""
ONE_SEGMENT: dict[str, Any] = {"budget": "2MiB", "segment": "2MiB"}


@pytest.fixture(params=[DEBIAN_REDIS, VALKEY], ids=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    with running_server(request.param, "--maxmemory-policy", "noeviction") as server:
        yield server


def tiers(server: RealServer, **more: Any) -> dict[str, Any]:
    return {"redis": {"url": server.url}, "drain_s": 0.0, **more}


def prompt(number: int) -> list[int]:
    return [1000 + number, *PROMPT[1:]]


def compute(daemon: Daemon, token_ids: list[int]) -> int:
    """Publishes a prompt; how many of its tokens were there already, checked number by number."""
    with kvd_client.connect(daemon.folder, reserve_ahead_tokens=0) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence(token_ids) as seq:
            num_cached = seq.num_cached_tokens
            assert holds(seq, token_ids, num_cached)
            fill(seq, token_ids)
            seq.commit()
    return num_cached


def found(daemon: Daemon, token_ids: list[int]) -> int:
    """As `compute`, publishing nothing."""
    with kvd_client.connect(daemon.folder, reserve_ahead_tokens=0) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence(token_ids, wait_s=5, announce=False) as seq:
            assert holds(seq, token_ids, seq.num_cached_tokens)
            return seq.num_cached_tokens


def pool(daemon: Daemon) -> PoolStatus:
    with kvd_client.connect(daemon.folder) as client:
        client.check()
        (found,) = client.status().pools
        return found


def num_spilled(daemon: Daemon) -> int:
    return pool(daemon).counters["spills"]


def test_a_block_that_is_reused_answers_only_to_its_new_hash(tmp_path: Path, server: RealServer) -> None:  # case A6
    prompts = [prompt(number) for number in range(NUM_FITTING + 2)]
    with running_daemon(tmp_path, **ONE_SEGMENT, tiers=tiers(server, spill="write_through")) as daemon:
        for number, one in enumerate(prompts, start=1):
            assert compute(daemon, one) == 0
            eventually(lambda number=number: num_spilled(daemon) == number * NUM_BLOCKS)
        assert pool(daemon).num_segments == 1
        assert pool(daemon).counters["evictions"] >= len(prompts) * NUM_BLOCKS - CAPACITY
        with kvd_client.connect(daemon.folder) as client:
            cache = client.cache(model=MODEL, layout=LAYOUT)
            resident = [cache.match(one) for one in prompts]
        assert sum(resident) // LAYOUT.block_tokens <= CAPACITY
        assert resident[0] == 0
        assert resident[-1] == NUM_CACHED
        server.freeze()
        # Memory alone answers: what is gone is a miss, never the block that lies in its place now.
        for one, num_resident in zip(reversed(prompts), reversed(resident), strict=True):
            with kvd_client.connect(daemon.folder) as client:
                cache = client.cache(model=MODEL, layout=LAYOUT)
                assert cache.match(one) <= num_resident
                with cache.sequence(one, announce=False, wait_s=0) as seq:
                    # Making room for the rest may have cost others theirs; nobody is given what is not his.
                    assert holds(seq, one, seq.num_cached_tokens)
        server.thaw()
        # And they come back from below, each into a place where another one lay.
        for _ in range(2):
            for one in prompts:
                eventually(lambda one=one: found(daemon, one) == NUM_CACHED)
        assert pool(daemon).counters["fills"] >= NUM_BLOCKS


def test_a_refused_copy_leaves_the_block_and_pressure_drops_it_counted(  # case C3
    tmp_path: Path, server: RealServer
) -> None:
    with running_daemon(tmp_path, **ONE_SEGMENT, tiers=tiers(server)) as daemon:
        with kvd_client.connect(daemon.folder) as client:
            client.cache(model=MODEL, layout=LAYOUT).match(PROMPT)  # the namespace is known below
        with server.client() as control:
            control.config_set("maxmemory", 1)
        for number in range(NUM_FITTING):
            assert compute(daemon, prompt(number)) == 0
        eventually(lambda: pool(daemon).counters["failed_spills"] > 0)
        now = pool(daemon)
        assert (now.num_sealed, now.counters["spills"], now.counters["dropped_unspilled"]) == (
            NUM_FITTING * NUM_BLOCKS,
            0,
            0,
        )
        assert [compute(daemon, prompt(number)) for number in range(NUM_FITTING)] == [NUM_CACHED] * NUM_FITTING
        assert compute(daemon, prompt(NUM_FITTING)) == 0
        now = pool(daemon)
        num_wanted = (NUM_FITTING + 1) * NUM_BLOCKS + 1  # the last token of the last prompt has a block of its own
        assert now.counters["dropped_unspilled"] == now.counters["evictions"] == num_wanted - CAPACITY
        with kvd_client.connect(daemon.folder) as client:
            (tier,) = client.status().tiers
            assert tier.errors["full"] > 0
            assert tier.usage is None or tier.usage.num_blocks == 0
        with server.client() as control:
            control.config_set("maxmemory", 0)
        with kvd_client.connect(daemon.folder) as client:
            eventually(lambda: client.spill() == 0, 30)
            client.flush(model=MODEL, tier="pool")
        assert found(daemon, prompt(NUM_FITTING)) == NUM_CACHED, "it went on by itself"


def test_a_promotion_takes_no_block_that_is_held(tmp_path: Path, server: RealServer) -> None:  # case C4
    with running_daemon(tmp_path, name="before", tiers={"redis": {"url": server.url}}) as daemon:
        compute(daemon, PROMPT)
    with (
        running_daemon(tmp_path, **ONE_SEGMENT, tiers=tiers(server)) as daemon,
        kvd_client.connect(daemon.folder, reserve_ahead_tokens=0) as holder,
    ):
        cache = holder.cache(model=MODEL, layout=LAYOUT)
        held = []
        for number in range(NUM_FITTING):
            one = prompt(number)[:-1]
            seq = cache.sequence(one, max_tokens=NUM_CACHED, wait_s=0)
            fill(seq, one)
            seq.commit()
            held.append((one, seq))
        begun, num_held = pool(daemon), NUM_FITTING * NUM_BLOCKS
        assert (begun.num_referenced, begun.num_free, begun.num_reserved) == (num_held, CAPACITY - num_held, 0)
        with kvd_client.connect(daemon.folder, reserve_ahead_tokens=0) as client:
            asking = client.cache(model=MODEL, layout=LAYOUT)
            with pytest.raises(OutOfBlocks, match="held by"):
                asking.sequence(PROMPT, wait_s=0.2)
            asking.prefetch(PROMPT)
            # As far as there is room; nothing that is held went for it.
            eventually(lambda: asking.match(PROMPT) == (CAPACITY - num_held) * LAYOUT.block_tokens)
            assert pool(daemon).num_referenced == num_held
            assert all(holds(seq, one, NUM_CACHED) for one, seq in held)
            # What nobody holds any more may go.
            held.pop()[1].close()
            eventually(lambda: pool(daemon).num_referenced == num_held - NUM_BLOCKS)  # a release has no answer
            eventually(lambda: client.spill() == 0)  # what is being copied is held for that moment
            with asking.sequence(PROMPT, max_tokens=161, wait_s=5) as seq:
                assert seq.num_cached_tokens == NUM_CACHED
                assert holds(seq, PROMPT, NUM_CACHED)
            assert all(holds(seq, one, NUM_CACHED) for one, seq in held)
        for _, seq in held:
            seq.close()
