"""l2_get, l3_get and promote_16_blocks.

Timed, each: token ids -> a memoryview of cached 2 MiB blocks that are not in memory, through the public API.
l2_get: one block, from the host tier. l3_get: one block, from the embedded Redis. promote_16_blocks: 16 blocks, from
the embedded Redis.
"""

from __future__ import annotations

from kvd.bench.below import Below
from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import Group, Row, Run, Target, interleaved
from kvd.bench.shapes import MIB

L2 = Target(name="l2_get", unit="ms", text="< 2 ms", at_most=2)
L3 = Target(name="l3_get", unit="ms", text="< 5 ms", at_most=5)
PROMOTE_16 = Target(name="promote_16_blocks", unit="ms", text="<= 30 ms", at_most=30)


def _measure(run: Run) -> list[Row]:
    run.step("starting two daemons")
    with (
        PrivateDaemon(memory_budget=256 * MIB, tiers_host_budget=256 * MIB) as with_host,
        PrivateDaemon(tiers=True, memory_budget=256 * MIB, tiers_redis_budget=512 * MIB) as with_redis,
        with_host.connect() as host_client,
        with_redis.connect() as redis_client,
    ):
        with_redis.await_tiers(redis_client)
        medians = interleaved(
            run,
            {
                "host": Below(host_client, "bench 1", 1).fetch_s,
                "redis": Below(redis_client, "bench 1", 1).fetch_s,
                "16 blocks": Below(redis_client, "bench 16", 16).fetch_s,
            },
        )
    host, redis, sixteen = (median * 1e3 for median in medians.values())
    return [L2.row(host), L3.row(redis), PROMOTE_16.row(sixteen)]


GROUP = Group((L2, L3, PROMOTE_16), _measure)
