"""All pools of a daemon, their sessions, and one budget for each device."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection

from kvd.block import HOST, PAGE_NBYTES, ChainHash, NamespaceDigest, SessionId
from kvd.errors import InvalidLayout, InvalidRequest, StateError
from kvd.pool import integrity
from kvd.pool.block_map import block_map
from kvd.pool.blocks import SegmentState
from kvd.pool.budget import Budget
from kvd.pool.clock import LogicalClock
from kvd.pool.namespaces import NamespaceCounters
from kvd.pool.outcomes import BudgetUsage, DroppedSegment, LeaseFigures
from kvd.pool.pool import Pool
from kvd.pool.quotas import Quotas
from kvd.pool.sessions import Sessions
from kvd.pool.shrinking import Shrink
from kvd.pool.store import BlockStore
from kvd.status import NamespaceStatus, PoolStatus


class Pools:
    """Every call is for the loop thread; nothing is locked.

    `take_dropped` and `take_woken` are drained after every call: what they name cannot wait. Ids of pools, sessions and
    quotas are over all devices; memory is not: each device has a budget, and no segment moves between two of them.
    """

    def __init__(
        self,
        *,
        budget_nbytes: int,
        segment_nbytes: int,
        floor_segments: int = 1,
        session_quota_nbytes: int | None = None,
        uid_quota_nbytes: int | None = None,
        device: str = HOST,
    ) -> None:
        """`device` is the first one, and the one that is meant where a call names none."""
        self.device = device
        self._floor_segments = floor_segments
        self._budgets: dict[str, Budget] = {}
        self._sessions = Sessions(Quotas(session_quota_nbytes, uid_quota_nbytes))
        self._clock = LogicalClock()
        self._dropped: list[DroppedSegment] = []
        self._woken: list[tuple[int, ChainHash]] = []
        self._pools: list[Pool] = []
        """By pool id."""
        self._lingering: set[SessionId] = set()
        """Those that were ended but for reservations on cards."""
        self._by_shape: dict[tuple[str, str, int, str, str], Pool] = {}
        self.add_device(device, budget_nbytes=budget_nbytes, segment_nbytes=segment_nbytes)

    def add_device(self, device: str, *, budget_nbytes: int, segment_nbytes: int) -> None:
        """From now on pools may be made on this device, too."""
        if segment_nbytes <= 0 or segment_nbytes % PAGE_NBYTES:
            raise InvalidRequest(
                f"a segment of {segment_nbytes} bytes is not a whole number of {PAGE_NBYTES}-byte pages"
            )
        if budget_nbytes < 0 or self._floor_segments < 0:
            raise InvalidRequest(f"budget {budget_nbytes} and floor {self._floor_segments} must not be negative")
        if device in self._budgets:
            raise StateError(f"there is a budget for {device} already")
        self._budgets[device] = Budget(
            budget_nbytes=budget_nbytes, segment_nbytes=segment_nbytes, floor_segments=self._floor_segments
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """In the order in which they were added."""
        return tuple(self._budgets)

    def segment_nbytes(self, device: str) -> int:
        """Of every segment of that device."""
        return self._budgets[device].segment_nbytes

    def open_session(self, session: SessionId, uid: int) -> None:
        """A session begins. `uid` is the kernel's word."""
        self._sessions.open(session, uid)

    def end_session(self, session: SessionId, *, keep_on_cards: bool = False) -> bool:
        """Every reference, reservation and announcement of it goes back, in all pools; its waiters' waits pass on.

        With `keep_on_cards` reservations there stay, since they may still be written; while there are any, which is
        returned, the session stays open. End it again when nobody writes them.
        """
        record = self._sessions.get(session)
        for pool_id in list(record.leases):
            pool = self._pools[pool_id]
            pool.end_lease(record, keep_reserved=keep_on_cards and pool.device != HOST)
        if record.leases:
            self._lingering.add(session)
            return True
        self._lingering.discard(session)
        self._sessions.close(record)
        return False

    def lingers(self, session: SessionId) -> bool:
        """Whether a session that was ended is still open for what it reserved on cards."""
        return session in self._lingering

    def is_held_by_lingering(self, pool: Pool) -> bool:
        """Whether blocks of the pool come back when the process of a session that was ended is gone."""
        return any(pool.pool_id in self._sessions.get(session).leases for session in self._lingering)

    def pool(
        self,
        tenant: str,
        block_nbytes: int,
        name: str = "",
        *,
        device: str | None = None,
        source: Pool | None = None,
    ) -> Pool:
        """The tenant's pool of that block size and name on the device, made on demand without memory.

        Pools of different names keep apart what one would hold together: a namespace may have blocks in several. With
        `source` it is the pool beside that one, for those who cannot map the other's device.

        Raises `InvalidLayout` when a block is not whole pages or larger than a segment.
        """
        device = self.device if device is None else device
        shape = (device, tenant, block_nbytes, name, "" if source is None else source.device)
        found = self._by_shape.get(shape)
        if found is not None:
            return found
        if block_nbytes <= 0 or block_nbytes % PAGE_NBYTES:
            raise InvalidLayout(f"a block of {block_nbytes} bytes is not a whole number of {PAGE_NBYTES}-byte pages")
        budget = self._budgets[device]
        if block_nbytes > budget.segment_nbytes:
            raise InvalidLayout(
                f"a block of {block_nbytes} bytes does not fit a segment of {budget.segment_nbytes}; raise "
                f"memory.segment"
            )
        store = BlockStore(len(self._pools), budget.segment_nbytes // block_nbytes, self._clock, self._dropped)
        found = Pool(
            tenant=tenant,
            block_nbytes=block_nbytes,
            name=name,
            device=device,
            source=source,
            store=store,
            budget=budget,
            sessions=self._sessions,
            woken=self._woken,
        )
        budget.stores.append(store)
        self._pools.append(found)
        self._by_shape[shape] = found
        return found

    @property
    def all(self) -> tuple[Pool, ...]:
        """Every pool, by id."""
        return tuple(self._pools)

    def get(self, pool_id: int) -> Pool:
        """The pool of an id that a pool was given."""
        return self._pools[pool_id]

    def of_device(self, device: str) -> list[Pool]:
        """Its pools, by id."""
        return [pool for pool in self._pools if pool.device == device]

    def set_quotas(self, *, session_nbytes: int | None, uid_nbytes: int | None) -> None:
        """From now on nobody gets more than this. Who holds more keeps it."""
        self._sessions.quotas = Quotas(session_nbytes, uid_nbytes)

    def set_budget(self, nbytes: int, device: str | None = None) -> None:
        """Shrinks by retiring segments, unpinned and coldest first; grows later, on demand.

        Segments with held blocks leave when the last of them is released: `usage` says how much is still to go.
        """
        if nbytes < 0:
            raise InvalidRequest(f"a budget of {nbytes} bytes is negative")
        self._of(device).set_nbytes(nbytes)

    def retire_all(self, device: str) -> None:
        """Every segment of the device leaves its pool, as soon as nobody holds a block of it."""
        for store in self._budgets[device].stores:
            for segment in store.active():
                store.retire(segment)

    def plan_shrink(self, nbytes: int, device: str) -> Shrink:
        """What a budget of that size would take now; changes nothing."""
        by_store = {pool.store.pool_id: pool for pool in self._pools}
        return Shrink([(by_store[store.pool_id], segment) for store, segment in self._budgets[device].excess(nbytes)])

    def set_draining(self, device: str, num_segments: int) -> None:
        """So many segments left their pools and still hold memory: they are no room until they are gone."""
        self._budgets[device].num_draining = num_segments

    def growth_failed(self, pool_id: int, reason: str) -> None:
        """Memory for a `Grow` of that pool could not be had: until `memory_retry` the device's pools evict instead."""
        self._pools[pool_id].budget.growth_failed(f"{reason} (for pool {pool_id})")

    def memory_retry(self, device: str | None = None) -> None:
        """Memory of the device may be had again."""
        self._of(device).memory_retry()

    def num_segments_room(self, device: str | None = None) -> int:
        """Segments that could still be given, whichever pool asks; a pool without block ids for more makes it 0."""
        return self._of(device).room_for_any

    def has_announcements(self, session: SessionId) -> bool:
        """Whether the session announced a hash, in any pool, that nobody sealed yet."""
        return any(lease.announced for lease in self._sessions.get(session).leases.values())

    def take_dropped(self) -> list[DroppedSegment]:
        """The segments that left their pools since the last call."""
        dropped = self._dropped[:]
        self._dropped.clear()
        return dropped

    def take_woken(self) -> list[tuple[int, ChainHash]]:
        """(pool id, hash) of every `WaitFor` that is over, well or not, since the last call."""
        woken = self._woken[:]
        self._woken.clear()
        return woken

    def session_figures(self, session: SessionId) -> LeaseFigures:
        """What the session holds."""
        record = self._sessions.get(session)
        leases = record.leases.values()
        return LeaseFigures(
            num_references=sum(lease.num_references for lease in leases),
            num_reserved=sum(len(lease.reserved) for lease in leases),
            held_nbytes=record.held_nbytes,
            num_announced=sum(len(lease.announced) for lease in leases),
        )

    def usage(self, device: str | None = None) -> BudgetUsage:
        """The device's budget and what is used of it."""
        budget = self._of(device)
        num_segments = budget.num_segments
        num_active = sum(store.num_active() for store in budget.stores)
        return BudgetUsage(
            budget_nbytes=budget.budget_nbytes,
            used_nbytes=num_segments * budget.segment_nbytes,
            num_segments=num_segments,
            num_segments_retiring=num_segments - num_active,
            num_segments_draining=budget.num_draining,
        )

    def _of(self, device: str | None) -> Budget:
        return self._budgets[self.device if device is None else device]

    @property
    def num_namespaces(self) -> int:
        """Over all pools."""
        return self.num_namespaces_of("")

    def num_namespaces_of(self, tenant: str) -> int:
        """Over the pools of one tenant; of all with an empty name."""
        return sum(len(pool.namespaces) for pool in self._pools if tenant in {"", pool.tenant})

    def forget_namespaces(self, in_use: Collection[NamespaceDigest]) -> list[NamespaceDigest]:
        """Those that no pool knows any more: nobody uses them and no block is of them. O(namespaces)."""
        forgotten = {digest for pool in self._pools for digest in pool.forget_namespaces(in_use)}
        return list(forgotten.difference(*(pool.namespaces for pool in self._pools)))

    def pool_statuses(self, *, with_map: bool = False) -> list[PoolStatus]:
        """One per pool, by id; `with_map` with a picture of its blocks."""
        return [_pool_status(pool, with_map=with_map) for pool in self._pools]

    def namespace_statuses(self, *, tenant: str = "", limit: int | None = None) -> list[NamespaceStatus]:
        """One per namespace that somebody opened, by pool; of one tenant only, if named.

        With `limit` only so many, those with most sealed blocks: O(namespaces), but little for each that is left out.
        """
        found = [
            (pool, namespace)
            for pool in self._pools
            if tenant in {"", pool.tenant}
            for namespace in pool.namespaces.values()
        ]
        if limit is not None and len(found) > limit:
            found = heapq.nlargest(limit, found, key=lambda one: (one[1].num_sealed, one[1].lookups))
            found.sort(key=lambda one: one[0].pool_id)
        return [_namespace_status(pool, namespace) for pool, namespace in found]

    def namespace_totals(self) -> dict[str, int]:
        """The counters of all namespaces there ever were, summed: they never fall."""
        totals: Counter[str] = Counter()
        for pool in self._pools:
            totals.update(pool.namespaces.totals())
        return totals

    def check_integrity(self) -> None:
        """Verifies every invariant; O(blocks). Raises `StateError` naming the first fault."""
        for pool in self._pools:
            integrity.check_pool(pool, self._sessions)
        integrity.check_sessions(self._pools, self._sessions)


def _namespace_status(pool: Pool, namespace: NamespaceCounters) -> NamespaceStatus:
    words, layout = namespace.words, namespace.words.layout
    return NamespaceStatus(
        digest=namespace.digest.hex(),
        pool=pool.pool_id,
        model=words.model,
        engine=words.engine,
        adapter=words.adapter,
        has_salt=words.has_salt,
        block_tokens=words.block_tokens,
        num_sealed=namespace.num_sealed,
        counters=namespace.as_dict(),
        positional=words.positional,
        num_layers=layout.num_layers if layout else 0,
        num_kv_heads=layout.num_kv_heads if layout else 0,
        head_dim=layout.head_dim if layout else 0,
        dtype=layout.dtype if layout else "",
        computed_tokens=namespace.computed_tokens,
        computed_s=namespace.computed_s,
    )


def _pool_status(pool: Pool, *, with_map: bool) -> PoolStatus:
    store = pool.store
    letters, step = block_map(store) if with_map else ("", 1)
    return PoolStatus(
        pool=pool.pool_id,
        tenant=pool.tenant,
        name=pool.name,
        device=pool.device,
        staged_from="" if pool.source is None else pool.source.device,
        block_nbytes=pool.block_nbytes,
        num_segments=len(store.segments),
        num_segments_retiring=sum(s.state is SegmentState.RETIRING for s in store.segments.values()),
        num_free=store.num_free,
        num_reserved=store.num_reserved,
        num_filling=store.num_filling,
        num_sealed=store.num_sealed,
        num_referenced=store.num_referenced,
        num_references=store.num_references,
        counters=pool.counters(),
        block_map=letters,
        map_step=step,
    )
