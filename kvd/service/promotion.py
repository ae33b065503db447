"""Brings up what a prefix continues with below: one question, then copies of the blocks that follow without a gap.

For a pool that stands beside a card, the card's pool comes first: what it has is known at once, and only what follows
is asked for below.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt, StateError
from kvd.mover import Carry, Fill, Lookup, Mover, Rank
from kvd.pool import FillTicket, Grow, HeldBlock, Pool
from kvd.service.lineage import Lineage, Lineages
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Cache
from kvd.tiers.base import TierKey

MAX_PROMOTIONS = 256
"""At the same time; beyond that a missing block is simply computed."""
MAX_ASKED = 1 << 17
"""Hashes that the tiers are being asked about beyond which a prompt that nobody waits for is not looked for: each takes
some 200 bytes until it is answered, and who prefetches is held back by no answer."""
FROM_CARD = -1
"""The place of a block that the card's pool has; others are levels of the tiers."""
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
        "source_hold",
        "sources",
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
        self.fills: dict[int, Fill | Carry] = {}
        """The copies under way, by their ticket's generation."""
        self.source_hold = 0
        """Keeps what is copied from the card's pool; 0 for nothing."""
        self.sources: dict[ChainHash, HeldBlock] = {}

    @property
    def is_void(self) -> bool:
        """Whether the namespace was flushed meanwhile."""
        return self.num_flushes != self.lineage.num_flushes


class Promotions:
    """All that are under way. Loop thread only.

    `grow(pool)` gets one more segment for a pool, now, later (then `memory_ready` is called), or not at all.
    `resume(number)` lets the begin that waits for a promotion go on. `drops_below(pool)`: whether the lower copy of
    what came up into that pool goes. `is_lost(pool)`: its card is gone for good.
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
        is_lost: Callable[[Pool], bool] = lambda _pool: False,
    ) -> None:
        self._mover = mover
        self._lineages = lineages
        self._table = table
        self._grow = grow
        self._resume = resume
        self._drops_below = drops_below
        self._is_lost = is_lost
        self._numbers = itertools.count(1)
        self._open: dict[int, Promotion] = {}
        self._by_hash: dict[tuple[int, ChainHash], Promotion] = {}
        """Of each FILLING hash the promotion that brings it."""
        self._num_asked = 0
        """Hashes in questions that are not answered yet."""
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
        source, missing = cache.pool.source, hashes[num_resident:]
        num_on_card = 0 if source is None or self._is_lost(source) else source.match(missing)
        rest = missing[num_on_card:]
        asks = bool(rest) and self._mover.stack.is_answering()
        if asks and not waited_for and self._num_asked and self._num_asked + len(rest) > MAX_ASKED:
            self.num_refused += 1
            asks = False
        if not num_on_card and not asks:
            return None
        hold = cache.pool.hold(hashes[:num_resident])
        promotion = Promotion(next(self._numbers), cache, lineage, hold, waited_for=waited_for)
        self._open[promotion.number] = promotion
        if source is not None and num_on_card:
            promotion.source_hold = source.hold(missing[:num_on_card])
            promotion.sources = {one.hash: one for one in source.held(promotion.source_hold)}
            promotion.todo.extend((chain_hash, FROM_CARD) for chain_hash in missing[:num_on_card])
            cache.namespace.asked_below += num_on_card
            cache.namespace.found_below += num_on_card
        promotion.is_asking = asks
        if asks:
            self._num_asked += len(rest)

            def on_done(job: Lookup) -> None:
                self._looked_up(promotion, rest, job)

            self._mover.submit([Lookup([TierKey(cache.digest, chain_hash) for chain_hash in rest], on_done)])
        if num_on_card:
            self._fill(promotion)
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
        self._num_asked -= len(missing)
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
        jobs: list[Fill | Carry] = []
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
        if not todo and not promotion.is_asking and not promotion.woken:
            promotion.woken = True
            self._resume(promotion.number)
        self._end_if_done(promotion)

    def _job(self, promotion: Promotion, ticket: FillTicket, place: int) -> Fill | Carry:
        cache = promotion.cache
        job: Fill | Carry
        if place == FROM_CARD:
            job = self._carry(promotion, ticket)
        else:
            job = Fill(
                ticket,
                TierKey(cache.digest, ticket.hash),
                place,
                self._table.memory(cache.pool, ticket.block),
                lambda job: self._filled(promotion, job, has_copy_below=job.kept_below),
                wanted=promotion.waited_for,
                drop_below=self._drops_below(cache.pool),
            )
        promotion.fills[ticket.generation] = job
        self._by_hash[cache.pool.pool_id, ticket.hash] = promotion
        return job

    def _carry(self, promotion: Promotion, ticket: FillTicket) -> Carry:
        """The copy of a block that the card's pool has."""
        pool = promotion.cache.pool
        source = pool.source
        if source is None:
            raise StateError(f"pool {pool.pool_id} stands beside no other")
        there = promotion.sources[ticket.hash]

        def on_done(job: Carry) -> None:
            if isinstance(job.error, BlockCorrupt):
                source.forget_corrupt(ticket.hash)
            # What the card has counts as a copy: the block is the first to go, and what becomes of it is decided there.
            self._filled(promotion, job, has_copy_below=True, checksum=there.checksum)

        return Carry(
            ticket,
            self._table.memory(source, there.block),
            self._table.memory(pool, ticket.block),
            on_done,
            checksum=there.checksum,
            rank=Rank.WANTED_FILL if promotion.waited_for else Rank.FILL,
        )

    def _filled(self, promotion: Promotion, job: Fill | Carry, *, has_copy_below: bool, checksum: int = 0) -> None:
        pool, ticket = promotion.cache.pool, job.ticket
        del promotion.fills[ticket.generation]
        if self._by_hash.get((pool.pool_id, ticket.hash)) is promotion:  # else a flush came, then another
            del self._by_hash[pool.pool_id, ticket.hash]
        pool.complete_fill(ticket, job.error is None, has_copy_below=has_copy_below, checksum=checksum)
        self._end_if_done(promotion)

    def _end_if_done(self, promotion: Promotion) -> None:
        if promotion.waited_for or promotion.is_asking or promotion.todo or promotion.fills:
            return
        if self._open.pop(promotion.number, None) is not None:
            pool = promotion.cache.pool
            pool.end_hold(promotion.hold)
            if pool.source is not None:
                pool.source.end_hold(promotion.source_hold)
