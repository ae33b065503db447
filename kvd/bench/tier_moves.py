"""redis_spill, redis_spill_serving, redis_promote, redis_promote_serving and begin_p99_under_spill.

redis_spill. Timed: 64 idle blocks of 2 MiB, from the request to copy them down until all of them have a copy.

redis_promote. Timed: token ids -> a view of 64 blocks of 2 MiB that only Redis has.

Limit of both: the same 128 MiB through `kvd.bench.raw_redis`, on the same server's socket. Throughputs; ratio: value /
limit.

redis_spill_serving: redis_spill while `kvd.bench.load` begins 256 resident blocks 500 times a second; the limit is
measured without that load. redis_promote_serving: redis_promote beside it, in the same way.

begin_p99_under_spill. The 99th percentile of the load's begins while blocks are spilled; limit: of those while nothing
else runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import kvd_client
from kvd.bench.below import Below, copy_down
from kvd.bench.load import Load
from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.raw_redis import RawRedis
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved, seconds
from kvd.bench.shapes import MIB, TWO_MIB, prompt
from kvd.bench.writer import seal_prompt

NUM_BLOCKS = 64
NBYTES = NUM_BLOCKS * TWO_MIB.block_nbytes
SPILLED = "bench spill"
IDLE_S = 0.25

SPILL = Target(name="redis_spill", unit="GiB/s", text=">= 0.9x raw RESP", at_least=0.9)
SPILL_SERVING = Target(name="redis_spill_serving", unit="GiB/s", text=">= 0.5x raw RESP", at_least=0.5)
PROMOTE = Target(name="redis_promote", unit="GiB/s", text=">= 0.9x raw RESP", at_least=0.9)
PROMOTE_SERVING = Target(name="redis_promote_serving", unit="GiB/s", text=">= 0.5x raw RESP", at_least=0.5)
P99 = Target(name="begin_p99_under_spill", unit="us", text="<= 3x idle", at_most=3)


class Spiller:
    """Writes 64 blocks, copies them down, and has them forgotten everywhere, again and again."""

    def __init__(self, client: kvd_client.Client) -> None:
        self._client = client
        self._cache = client.cache(model=SPILLED, layout=TWO_MIB)
        self._ids = prompt(7, NUM_BLOCKS * TWO_MIB.block_tokens + 1)

    def write(self) -> None:
        """64 new blocks."""
        self._client.flush(model=SPILLED)
        seal_prompt(self._cache, self._ids, b"\1")

    def spill_s(self) -> float:
        """Seconds from the request until all blocks have a copy."""
        return copy_down(self._client)


class Serving:
    """Runs a measure under load, and keeps the load's own times."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.begins: dict[str, list[float]] = {}

    def under_load(self, name: str, prepare: Callable[[], None], measure: Callable[[], float]) -> Callable[[], float]:
        """The measure, with the load running beside it from a little before; not yet while it is prepared."""
        times = self.begins.setdefault(name, [])

        def measured() -> float:
            prepare()
            self._load.go()
            try:
                return measure()
            finally:
                times.extend(self._load.stop())

        return measured


def after(prepare: Callable[[], None], measure: Callable[[], float]) -> float:
    """The measure, prepared."""
    prepare()
    return measure()


def idle_s() -> float:
    """Nothing runs but the load."""
    time.sleep(IDLE_S)
    return IDLE_S


def _measure(run: Run) -> list[Row]:
    run.step("starting a daemon")
    with (
        PrivateDaemon(
            tiers=True, memory_budget=512 * MIB, memory_segment=64 * MIB, tiers_redis_budget=1536 * MIB
        ) as daemon,
        daemon.connect() as client,
    ):
        path = Path(daemon.await_tiers(client).address.removeprefix("unix://"))
        with RawRedis(path, NUM_BLOCKS, TWO_MIB.block_nbytes) as raw, Load(daemon.runtime_dir) as load:
            promoted = Below(client, "bench promote", NUM_BLOCKS)
            spiller = Spiller(client)
            serving = Serving(load)
            medians = interleaved(
                run,
                {
                    "spill": lambda: after(spiller.write, spiller.spill_s),
                    "spill, serving": serving.under_load("spill", spiller.write, spiller.spill_s),
                    "raw SET": lambda: after(raw.renew, lambda: seconds(raw.put_all)),
                    "promote": lambda: after(promoted.forget, promoted.bring_up_s),
                    "promote, serving": serving.under_load("promote", promoted.forget, promoted.bring_up_s),
                    "raw GET": lambda: seconds(raw.get_all),
                    "begin": serving.under_load("idle", lambda: None, idle_s),
                },
            )
        client.check()
    spill, spill_serving, put, promote, promote_serving, get = (
        NBYTES / (1 << 30) / medians[name]
        for name in ("spill", "spill, serving", "raw SET", "promote", "promote, serving", "raw GET")
    )
    under_spill, idle = p99(serving.begins["spill"]), p99(serving.begins["idle"])
    return [
        SPILL.row(spill, put),
        SPILL_SERVING.row(spill_serving, put),
        PROMOTE.row(promote, get),
        PROMOTE_SERVING.row(promote_serving, get),
        P99.row(under_spill * 1e6, idle * 1e6, note=f"{len(serving.begins['spill'])} begins beside spilling"),
    ]


def p99(times: list[float]) -> float:
    """The 99th percentile."""
    if len(times) < 2:
        raise CannotMeasure("the load did not come to a begin")
    return statistics.quantiles(times, n=100)[98]


GROUP = Group((SPILL, SPILL_SERVING, PROMOTE, PROMOTE_SERVING, P99), _measure)
