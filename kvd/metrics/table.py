"""Every metric: its name by Prometheus' rules (base units, `_total` for counters), its help, and where it comes from.

METRICS.md is made from here: `python -m kvd.metrics.reference > METRICS.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvd.status import MemoryStatus, PoolStatus, Snapshot, TierStatus, TierUsage

Sample = tuple[tuple[str, ...], float]
"""(label values, value)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. A counter counts up from the daemon's start and its name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Iterable[Sample]]


def _one(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [((), value(snapshot))]


def _memory(value: Callable[[MemoryStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [((memory.device,), value(memory)) for memory in snapshot.memories or [snapshot.memory]]


def _pools(value: Callable[[PoolStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [((str(pool.pool),), value(pool)) for pool in snapshot.pools]


def _counted(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return _pools(lambda pool: pool.counters.get(name, 0))


def _tiers(value: Callable[[TierStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [((tier.name,), value(tier)) for tier in snapshot.tiers]


def _usage(value: Callable[[TierUsage], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [((tier.name,), value(tier.usage)) for tier in snapshot.tiers if tier.usage is not None]


def _block_states(snapshot: Snapshot) -> Iterable[Sample]:
    for pool in snapshot.pools:
        name = str(pool.pool)
        yield (name, "free"), pool.num_free
        yield (name, "reserved"), pool.num_reserved
        yield (name, "filling"), pool.num_filling
        yield (name, "referenced"), pool.num_referenced
        yield (name, "idle"), pool.num_sealed - pool.num_referenced


def _lookups(snapshot: Snapshot) -> Iterable[Sample]:
    for pool in snapshot.pools:
        yield (str(pool.pool), "hit"), pool.counters.get("hits", 0)
        yield (str(pool.pool), "miss"), pool.counters.get("misses", 0)


def _evictions(snapshot: Snapshot) -> Iterable[Sample]:
    for pool in snapshot.pools:
        lost = pool.counters.get("dropped_unspilled", 0)
        yield (str(pool.pool), "yes"), pool.counters.get("evictions", 0) - lost
        yield (str(pool.pool), "no"), lost


def _tier_errors(snapshot: Snapshot) -> Iterable[Sample]:
    return [((tier.name, cause), number) for tier in snapshot.tiers for cause, number in sorted(tier.errors.items())]


def _server_events(snapshot: Snapshot) -> Iterable[Sample]:
    return [((name.removeprefix("num_"),), number) for name, number in sorted(snapshot.counters.items())]


def _mover_events(snapshot: Snapshot) -> Iterable[Sample]:
    counters = snapshot.mover.counters if snapshot.mover else {}
    return [((name,), number) for name, number in sorted(counters.items()) if not name.endswith("_nbytes")]


def _jobs(snapshot: Snapshot) -> Iterable[Sample]:
    if snapshot.mover is not None:
        for rank, number in sorted(snapshot.mover.queued.items()):
            yield (rank, "queued"), number
        for rank, number in sorted(snapshot.mover.running.items()):
            yield (rank, "running"), number


METRICS: tuple[Metric, ...] = (
    Metric("kvd_build_info", "gauge", "Always 1; the version is a label.", ("version",), lambda s: [((s.version,), 1)]),
    Metric("kvd_uptime_seconds", "gauge", "Since the daemon's start.", (), _one(lambda s: s.uptime_s)),
    Metric("kvd_warnings", "gauge", "Warnings that `kvd status` shows.", (), _one(lambda s: len(s.warnings))),
    Metric("kvd_memory_budget_bytes", "gauge", "What all pools together may take.", ("device",),
           _memory(lambda memory: memory.budget_nbytes)),
    Metric("kvd_memory_used_bytes", "gauge", "Segments that belong to a pool.", ("device",),
           _memory(lambda memory: memory.used_nbytes)),
    Metric("kvd_memory_ready_bytes", "gauge", "Segments made ahead of need.", ("device",),
           _memory(lambda memory: memory.ready_nbytes)),
    Metric("kvd_memory_available_bytes", "gauge", "What the machine, or the cgroup, could still give.", ("device",),
           _memory(lambda memory: memory.available_nbytes)),
    Metric("kvd_pool_block_bytes", "gauge", "Size of one block.", ("pool",), _pools(lambda pool: pool.block_nbytes)),
    Metric("kvd_pool_blocks", "gauge", "Blocks by state; idle ones are cached and may be evicted.", ("pool", "state"),
           _block_states),
    Metric("kvd_pool_segments", "gauge", "Segments of the pool.", ("pool",), _pools(lambda pool: pool.num_segments)),
    Metric("kvd_pool_references", "gauge", "References of all sessions, and of copies.", ("pool",),
           _pools(lambda pool: pool.num_references)),
    Metric("kvd_lookup_blocks_total", "counter", "Blocks that prompts asked for, by whether they were resident.",
           ("pool", "result"), _lookups),
    Metric("kvd_sealed_blocks_total", "counter", "Blocks that were published.", ("pool",), _counted("seals")),
    Metric("kvd_duplicate_seals_total", "counter", "Seals that met a block of the same hash.", ("pool",),
           _counted("duplicate_seals")),
    Metric("kvd_evicted_blocks_total", "counter", "Blocks given up for room, by whether a tier below has a copy.",
           ("pool", "copied"), _evictions),
    Metric("kvd_flushed_blocks_total", "counter", "Blocks that a flush made unfindable.", ("pool",),
           _counted("flushed")),
    Metric("kvd_out_of_blocks_total", "counter", "Requests refused because every block was held.", ("pool",),
           _counted("out_of_blocks")),
    Metric("kvd_saved_tokens_total", "counter", "Tokens that were found and not computed.", (),
           _one(lambda s: s.savings.num_tokens)),
    Metric("kvd_saved_prefill_seconds", "gauge",
           "Estimate of the time those would have taken, at the speed that clients report; it may be corrected.", (),
           _one(lambda s: s.savings.prefill_s)),
    Metric("kvd_pins", "gauge", "Prompts that are kept resident.", (), _one(lambda s: len(s.pins))),
    Metric("kvd_pinned_bytes", "gauge", "Bytes that those hold.", (),
           _one(lambda s: sum(pin.held_nbytes for pin in s.pins))),
    Metric("kvd_sessions", "gauge", "Clients that are connected.", (), _one(lambda s: len(s.clients))),
    Metric("kvd_sessions_stalled", "gauge", "Clients that do not read their replies.", (),
           _one(lambda s: sum(client.stalled for client in s.clients))),
    Metric("kvd_sessions_held_bytes", "gauge", "Bytes of blocks that clients hold, each client for itself.", (),
           _one(lambda s: sum(client.held_nbytes for client in s.clients))),
    Metric("kvd_waiting_requests", "gauge", "Requests that wait for blocks, memory or an answer.", (),
           _one(lambda s: sum(len(wait.waiting) for wait in s.waits))),
    Metric("kvd_server_events_total", "counter", "What the server and the service count, by name.", ("event",),
           _server_events),
    Metric("kvd_tier_up", "gauge", "1 while the tier answers, 0 while its circuit breaker is open.", ("tier",),
           _tiers(lambda tier: tier.state == "up")),
    Metric("kvd_tier_asked_blocks_total", "counter", "Blocks that were looked for in the tier.", ("tier",),
           _tiers(lambda tier: tier.num_asked)),
    Metric("kvd_tier_found_blocks_total", "counter", "Those of them that it had.", ("tier",),
           _tiers(lambda tier: tier.num_found)),
    Metric("kvd_tier_read_bytes_total", "counter", "Bytes that came up.", ("tier",),
           _tiers(lambda tier: tier.read_nbytes)),
    Metric("kvd_tier_read_seconds_total", "counter", "Time that took.", ("tier",), _tiers(lambda tier: tier.read_s)),
    Metric("kvd_tier_written_bytes_total", "counter", "Bytes that were copied down.", ("tier",),
           _tiers(lambda tier: tier.written_nbytes)),
    Metric("kvd_tier_write_seconds_total", "counter", "Time that took.", ("tier",), _tiers(lambda tier: tier.write_s)),
    Metric("kvd_tier_errors_total", "counter", "Failed calls by cause.", ("tier", "cause"), _tier_errors),
    Metric("kvd_tier_blocks", "gauge", "Blocks that the tier holds, as last measured.", ("tier",),
           _usage(lambda usage: usage.num_blocks)),
    Metric("kvd_tier_used_bytes", "gauge", "Bytes that they take there.", ("tier",),
           _usage(lambda usage: usage.used_nbytes)),
    Metric("kvd_tier_budget_bytes", "gauge", "What they may take; 0 when the tier names no limit.", ("tier",),
           _usage(lambda usage: usage.budget_nbytes)),
    Metric("kvd_mover_events_total", "counter", "What the copying threads count, by name.", ("event",), _mover_events),
    Metric("kvd_mover_jobs", "gauge", "Copies and questions by rank of urgency and state.", ("rank", "state"), _jobs),
    Metric("kvd_mover_thread_restarts_total", "counter", "Copying threads that died of a defect and were replaced.", (),
           _one(lambda s: s.mover.num_thread_restarts if s.mover else 0)),
)  # fmt: skip
"""In the order in which they are served."""
