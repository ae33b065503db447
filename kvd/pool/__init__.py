"""Block states, free runs, LRU, prefix index, leases: the heart of kvd. No I/O, no threads, no clock.

Everything here is called on the loop thread only; nothing is locked. Every verb validates the whole request first and
then takes effect, or raises with nothing changed (evictions that made room for a `Grow` excepted).

## API
`Pools` is all pools, and for each device the byte budget that its pools share:

    pools = Pools(budget_nbytes=…, segment_nbytes=…, floor_segments=1, session_quota_nbytes=None, uid_quota_nbytes=None,
                  device="host")
    pools.add_device(uuid, budget_nbytes=…, segment_nbytes=…)         a budget of its own; ids and quotas are shared
    pools.open_session(session, uid); pools.end_session(session)      everything it held goes back, in all pools; with
                                                                      keep_on_cards=True but for reservations there
    pool = pools.pool(tenant, block_nbytes, name="", device=…,
                      source=None)                                    made on demand
    pools.plan_shrink(nbytes, device) -> Shrink                       what a smaller budget would take
    pools.set_budget(nbytes, device); pools.growth_failed(pool_id, reason); pools.memory_retry()
    pools.num_segments_room(device)                                   segments the budget could still give
    pools.take_dropped(); pools.take_woken()                          drain after every call below
    pools.has_announcements(session); pools.session_figures(session) -> LeaseFigures
    pools.num_namespaces; pools.forget_namespaces(in_use) -> those that nobody needs any more
    pools.usage() -> BudgetUsage; pools.pool_statuses(); pools.namespace_statuses(); pools.check_integrity()

`Pool` is all segments of one tenant, block size and name; `namespace` is what `Pool.namespace(digest, words)` returned:

    pool.pool_id, pool.tenant, pool.block_nbytes, pool.name, pool.blocks_per_segment
    pool.add_segment() -> SegmentId                                   OutOfBlocks when the budget has no room any more
    pool.begin(session, namespace, hashes, max_cached=, num_blocks=, announce=, may_wait=,
               ask_below=False) -> Begun | WaitFor | AskBelow | Grow
    pool.reserve(session, num_blocks) -> list[BlockId] | Grow
    pool.seal(session, namespace, blocks, hashes, checksums=None) -> list[BlockId]
    pool.retain(session, blocks, num_blocks=0) -> list[BlockId] | Grow
    pool.release(session, blocks=(), reserved=(), hashes=())          blocks from head to tail of their sequence
    pool.match(hashes) -> int; pool.checksums(session, blocks) -> list[int]
    pool.begin_fill(namespace, hash, hold=0) -> FillTicket | Grow | None; pool.complete_fill(ticket, ok)
    pool.hold(hashes) -> int; pool.held(hold); pool.end_hold(hold)    what a promotion gathered stays until it is taken
    pool.num_expendable, pool.num_attainable                          what watermarks compare
    pool.spill_candidates(limit, newest_first=, accept=); pool.without_copy(hashes)
    pool.begin_spill(block) -> SpillTicket; pool.complete_spill(ticket, ok); pool.forget_corrupt(hash)
    pool.drop_namespaces(digests) -> int                              flush

Raises `OutOfBlocks`, `QuotaExceeded`, `OutOfMemory` (growth failed and the pool has no memory at all), `NotOwned`,
`InvalidRequest`, `InvalidLayout`; `StateError` is always a defect in kvd.
"""

from __future__ import annotations

from kvd.pool.namespaces import NamespaceCounters, NamespaceWords
from kvd.pool.outcomes import (
    AskBelow,
    Begun,
    BudgetUsage,
    DroppedSegment,
    FillTicket,
    Grow,
    HeldBlock,
    LeaseFigures,
    SpillTicket,
    WaitFor,
)
from kvd.pool.pool import Pool
from kvd.pool.pools import Pools
from kvd.pool.shrinking import Shrink

__all__ = [
    "AskBelow",
    "Begun",
    "BudgetUsage",
    "DroppedSegment",
    "FillTicket",
    "Grow",
    "HeldBlock",
    "LeaseFigures",
    "NamespaceCounters",
    "NamespaceWords",
    "Pool",
    "Pools",
    "Shrink",
    "SpillTicket",
    "WaitFor",
]
