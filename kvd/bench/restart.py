"""ttft_4096_restart: the real SmolLM2-135M on the CPU.

Timed: attaching to a prompt of 4097 tokens, of which 4096 lie in Redis since before the daemon was stopped and started
again, and the forward pass over the one left, to the first token. Limit: the whole prompt through an empty
DynamicCache; ratio: limit / value. At most `MAX_ROUNDS` rounds, each with a restart of its own.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import kvd_client
from kvd.bench.model import attach
from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved
from kvd.bench.shapes import MIB, prompt
from kvd.bench.smollm2 import Model

NUM_CACHED = 4096
MAX_TOKENS = NUM_CACHED + 64
MAX_ROUNDS = 5
WAIT_S = 30.0

TARGET = Target(name="ttft_4096_restart", unit="ms", text=">= 10x faster than the cold prefill", at_least=10)


class Restarts:
    """Daemons one after another over one persistence folder."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._ids = prompt(8, NUM_CACHED + 1)
        self.first: set[int] = set()
        """The first tokens that came out: one, if all is well."""
        with self._daemon() as daemon, daemon.connect() as client:
            daemon.await_tiers(client)
            with attach(client, model, self._ids, max_tokens=MAX_TOKENS) as cache:
                self.first.add(model.step(self._ids, cache))

    def cold_s(self) -> float:
        """Everything is computed."""
        start = time.perf_counter()
        self.first.add(self._model.step(self._ids, self._model.dynamic_cache()))
        return time.perf_counter() - start

    def restarted_s(self) -> float:
        """All but one token come from Redis."""
        with self._daemon() as daemon, daemon.connect() as client:
            daemon.await_tiers(client)
            return self._first_token_s(client)

    def _first_token_s(self, client: kvd_client.Client) -> float:
        start = time.perf_counter()
        # Named, since without a bound a begin takes what is there once a tier is silent for tens of milliseconds.
        with attach(client, self._model, self._ids, max_tokens=MAX_TOKENS, wait_s=WAIT_S) as cache:
            self.first.add(self._model.step(self._ids[cache.num_cached_tokens :], cache))
            taken = time.perf_counter() - start
            if cache.num_cached_tokens != NUM_CACHED:
                raise CannotMeasure(f"only {cache.num_cached_tokens} of {NUM_CACHED} tokens came back")
        return taken

    def _daemon(self) -> PrivateDaemon:
        return PrivateDaemon(
            tiers=True,
            memory_budget=512 * MIB,
            tiers_redis_budget=512 * MIB,
            tiers_redis_persistence=str(self._folder),
        )


def _measure(run: Run) -> list[Row]:
    run.step("loading SmolLM2-135M")
    model = Model()
    run.step("prefilling 4096 tokens")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        restarts = Restarts(model, Path(folder))
        times = interleaved(
            replace(run, rounds=min(run.rounds, MAX_ROUNDS)),
            {"cold prefill of 4096 tokens": restarts.cold_s, "restart": restarts.restarted_s},
        )
    cold_s, restarted_s = times.values()
    note = "" if len(restarts.first) == 1 else "tokens differ"
    return [TARGET.row(restarted_s * 1e3, cold_s * 1e3, ratio=cold_s / restarted_s, note=note)]


GROUP = Group((TARGET,), _measure)
