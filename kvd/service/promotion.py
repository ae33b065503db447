"""Brings up what a prefix continues with below: one question, then copies of the blocks that follow without a gap."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvd.block import ChainHash, NamespaceDigest
from kvd.mover import Fill, Lookup, Mover
from kvd.pool import FillTicket, Grow, Pool
from kvd.service.lineage import Lineage, Lineages
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Cache
from kvd.tiers.base import TierKey

MAX_PROMOTIONS = 256
"""At the same time; beyond that a missing block is simply computed."""
Grown = Literal["grown", "later", "refused"]


class Promotion:
    """One prefix on its way up. It ends when nothing of it is under way any more and its waiter, if any, has gone on.

    Invariant: while it has a waiter, what it gathered is held, so the waiter finds it all when its turn comes.
    """

    __slots__ = (
        "cache",
        "fills",
        "hold",
        "is_abandoned",
        "is_asking",
        "lineage",
        "num_flushes",
        "number",
        "todo",
        "waited_for",
        "woken",
    )

    def __init__(self, number: int, cache: Cache, lineage: Lineage, hold: int, *, waited_for: bool) -> None:
        self.number = number
        self.cache = cache
        self.lineage = lineage
        self.num_flushes = lineage.num_flushes
        self.hold = hold
        self.waited_for = waited_for
        """Whether a begin waits for it; it says so itself when it no longer does."""
        self.is_abandoned = False
        """Whether that begin was the only reason for it, and has gone on."""
        self.woken = False
        """Whether that begin was told that everything is on its way that will ever be."""
        self.is_asking = True
        self.todo: deque[tuple[ChainHash, int]] = deque()
        """Blocks known to be below (and in which tier) that have no block here to go into yet."""
        self.fills: dict[int, Fill] = {}
        """The copies under way, by their ticket's generation."""

    @property
    def is_void(self) -> bool:
        """Whether the namespace was flushed meanwhile."""
        return self.num_flushes != self.lineage.num_flushes


class Promotions:
    """All that are under way. Loop thread only.

    `grow(pool)` gets one more segment for a pool, now, later (then `memory_ready` is called), or not at all.
    `resume(number)` lets the begin that waits for a promotion go on. `drops_below(pool)`: whether the lower copy of
    what came up into that pool goes.
    """

    def __init__(
        self,
        *,
        mover: Mover,
        lineages: Lineages,
        table: SegmentTable,
        grow: Callable[[Pool], Grown],
        resume: Callable[[int], None],
        drops_below: Callable[[Pool], bool],
    ) -> None:
        self._mover = mover
        self._lineages = lineages
        self._table = table
        self._grow = grow
        self._resume = resume
        self._drops_below = drops_below
        self._numbers = itertools.count(1)
        self._open: dict[int, Promotion] = {}
        self._by_hash: dict[tuple[int, ChainHash], Promotion] = {}
        """Of each FILLING hash the promotion that brings it."""
        self.num_refused = 0
        """Prefixes that were not looked for below because too many are under way."""

    def __len__(self) -> int:
        return len(self._open)

    def owed_since_s(self, *, copies: bool) -> float | None:
        """Since when the tiers owe an answer; see `Mover.owed_since_s`."""
        return self._mover.owed_since_s(copies=copies)

    def busy_namespaces(self) -> set[NamespaceDigest]:
        """Those whose blocks are looked for or on their way."""
        return {promotion.cache.digest for promotion in self._open.values()}

    def start(
        self, cache: Cache, hashes: Sequence[ChainHash], num_resident: int, *, waited_for: bool
    ) -> Promotion | None:
        """Asks for what follows the first `num_resident` hashes. None when asking is no use now.

        `waited_for`: a begin waits for it, parked at its number, and calls `leave` when it does so no longer.
        """
        lineage = self._lineages.get(cache.digest)
        if lineage is None or lineage.num_flushing or num_resident >= len(hashes):
            return None
        if len(self._open) >= MAX_PROMOTIONS:
            self.num_refused += 1
            return None
        if not self._mover.stack.is_answering():
            return None
        hold = cache.pool.hold(hashes[:num_resident])
        promotion = Promotion(next(self._numbers), cache, lineage, hold, waited_for=waited_for)
        self._open[promotion.number] = promotion
        missing = hashes[num_resident:]

        def on_done(job: Lookup) -> None:
            self._looked_up(promotion, missing, job)

        self._mover.submit([Lookup([TierKey(cache.digest, chain_hash) for chain_hash in missing], on_done)])
        return promotion

    def leave(self, promotion: Promotion) -> None:
        """The begin that waited goes on or is gone. What nobody wants any more is taken back."""
        promotion.waited_for = False
        promotion.is_abandoned = True
        promotion.todo.clear()
        if promotion.fills:
            self._mover.cancel(promotion.fills.values())
        self._end_if_done(promotion)

    def hurry(self, pool: Pool, chain_hash: ChainHash) -> None:
        """Somebody waits for a block that is on its way."""
        promotion = self._by_hash.get((pool.pool_id, chain_hash))
        if promotion is not None and promotion.fills:
            self._mover.hurry(promotion.fills.values())

    def memory_ready(self) -> None:
        """Promotions that had no block to go into try again."""
        for promotion in list(self._open.values()):
            if promotion.todo:
                self._fill(promotion)

    def _looked_up(self, promotion: Promotion, missing: Sequence[ChainHash], job: Lookup) -> None:
        promotion.is_asking = False
        namespace = promotion.cache.namespace
        namespace.asked_below += len(missing)
        if job.error is None and not promotion.is_abandoned and not promotion.is_void:
            # A block that is here needs no copy below to be no gap; it is held with the others when its turn comes.
            expects = promotion.cache.pool.expects
            found = list(
                itertools.takewhile(
                    lambda one: one[1] is not None or expects(one[0]), zip(missing, job.places, strict=True)
                )
            )
            promotion.todo.extend((chain_hash, 0 if place is None else place) for chain_hash, place in found)
            namespace.found_below += sum(place is not None for _, place in found)
        self._fill(promotion)

    def _fill(self, promotion: Promotion) -> None:
        """Begins the copies of as many blocks as there is room for, in the order of the prefix."""
        cache, todo = promotion.cache, promotion.todo
        if promotion.is_void:
            todo.clear()
        jobs: list[Fill] = []
        refused = False
        while todo:
            chain_hash, place = todo[0]
            outcome = cache.pool.begin_fill(cache.namespace, chain_hash, hold=promotion.hold)
            if isinstance(outcome, Grow):
                grown = self._grow(cache.pool)
                if grown == "later":
                    break
                if grown == "refused":
                    # Told once, the pool evicts or gives up; to be asked again for memory is the end of it.
                    if refused:
                        todo.clear()
                    refused = True
                continue
            todo.popleft()
            if outcome is not None:
                jobs.append(self._job(promotion, outcome, place))
            elif not cache.pool.expects(chain_hash):
                todo.clear()  # no room, and behind a gap nothing is of use
        self._mover.submit(jobs)
        if not todo and not promotion.woken:
            promotion.woken = True
            self._resume(promotion.number)
        self._end_if_done(promotion)

    def _job(self, promotion: Promotion, ticket: FillTicket, place: int) -> Fill:
        cache = promotion.cache

        def on_done(job: Fill) -> None:
            del promotion.fills[ticket.generation]
            if self._by_hash.get((cache.pool.pool_id, ticket.hash)) is promotion:  # else a flush came, then another
                del self._by_hash[cache.pool.pool_id, ticket.hash]
            cache.pool.complete_fill(ticket, job.error is None, has_copy_below=job.kept_below)
            self._end_if_done(promotion)

        job = Fill(
            ticket,
            TierKey(cache.digest, ticket.hash),
            place,
            self._table.view(cache.pool, ticket.block),
            on_done,
            wanted=promotion.waited_for,
            drop_below=self._drops_below(cache.pool),
        )
        promotion.fills[ticket.generation] = job
        self._by_hash[cache.pool.pool_id, ticket.hash] = promotion
        return job

    def _end_if_done(self, promotion: Promotion) -> None:
        if promotion.waited_for or promotion.is_asking or promotion.todo or promotion.fills:
            return
        if self._open.pop(promotion.number, None) is not None:
            promotion.cache.pool.end_hold(promotion.hold)
