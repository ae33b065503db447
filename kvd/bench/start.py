"""start_to_ready and daemon_rss.

start_to_ready. Timed: spawning `kvd serve` with a budget of 16 GiB, and the tiers that are there by default, until it
has answered a status request.

daemon_rss. Measured: RssAnon of a daemon whose 1 GiB is full of 262,144 sealed blocks of 4 KiB, idle. Limit: 60 MB and
300 bytes a block.
"""

from __future__ import annotations

from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved
from kvd.bench.shapes import MIB, ONE_PAGE, prompt
from kvd.bench.writer import seal_prompt

START_BUDGET_NBYTES = 16 << 30
RSS_BUDGET_NBYTES = 1024 * MIB
BASE_NBYTES = 60e6
BLOCK_OVERHEAD_NBYTES = 300
SEQUENCE_BLOCKS = 1024

START = Target(name="start_to_ready", unit="s", text="< 2 s", at_most=2)
RSS = Target(name="daemon_rss", unit="MB", text="<= 60 MB + 300 B a block", at_most=1)


def _measure_start(run: Run) -> list[Row]:
    def start() -> float:
        with PrivateDaemon(tiers=True, memory_budget=START_BUDGET_NBYTES) as daemon:
            return daemon.start_s

    return [START.row(interleaved(run, {"start": start})["start"])]


def _measure_rss(run: Run) -> list[Row]:
    run.step("starting a daemon")
    with PrivateDaemon(memory_budget=RSS_BUDGET_NBYTES) as daemon, daemon.connect() as client:
        cache = client.cache(model="bench", layout=ONE_PAGE)
        num_blocks = RSS_BUDGET_NBYTES // ONE_PAGE.block_nbytes
        tokens_each = SEQUENCE_BLOCKS * ONE_PAGE.block_tokens
        for number in range(num_blocks // SEQUENCE_BLOCKS):
            run.step(f"sealing block {number * SEQUENCE_BLOCKS:,} of {num_blocks:,}")
            seal_prompt(cache, prompt(number, tokens_each))
        num_sealed = sum(pool.num_sealed for pool in client.status().pools)
        if num_sealed < 0.9 * num_blocks:
            raise CannotMeasure(f"only {num_sealed:,} of {num_blocks:,} blocks are in the pool")
        nbytes = daemon.anonymous_nbytes()
    limit = BASE_NBYTES + BLOCK_OVERHEAD_NBYTES * num_sealed
    return [RSS.row(nbytes / 1e6, limit / 1e6, note=f"{num_sealed:,} blocks")]


START_GROUP = Group((START,), _measure_start)
RSS_GROUP = Group((RSS,), _measure_rss)
