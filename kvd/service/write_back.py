"""What a staged client computed goes back into the pool on the card: copies up, best effort, a few at a time."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt
from kvd.mover import Carry, Mover, Rank
from kvd.pool import FillTicket, Grow, Pool, SpillTicket
from kvd.service.homes import Homes
from kvd.service.promotion import Grown
from kvd.service.segments import SegmentTable
from kvd.tiers.base import TierKey

MAX_BACKLOG = 1 << 16
"""Blocks that wait for their turn; of more than that the oldest stay where they are."""
_log = logging.getLogger(__name__)


class WriteBack:
    """Loop thread only. A block that cannot go back stays in its host pool, and is copied down like any other.

    Invariant: a block on its way holds the mover's reference in the host pool and is FILLING in the card's.
    """

    def __init__(
        self,
        *,
        mover: Mover,
        homes: Homes,
        table: SegmentTable,
        pools: Callable[[], Iterable[Pool]],
        grow: Callable[[Pool], Grown],
        on_there: Callable[[Pool, NamespaceDigest, ChainHash], None],
        on_left: Callable[[Pool, NamespaceDigest, ChainHash], None],
        max_nbytes: int,
        counters: Counter[str],
    ) -> None:
        """`on_there` is told of a block that the card's pool has now, `on_left` of one that stays in its host pool.

        At most `max_nbytes` are on their way at the same time. What is counted goes into `counters`.
        """
        self._mover = mover
        self._homes = homes
        self._table = table
        self._pools = pools
        self._grow = grow
        self._on_there = on_there
        self._on_left = on_left
        self._max_nbytes = max_nbytes
        self._backlogs: dict[int, deque[TierKey]] = {}
        self._in_flight_nbytes = 0
        self.counters = counters
        counters.update(written_back=0, written_back_twice=0, not_written_back=0)

    def sealed(self, pool: Pool, namespace: NamespaceDigest, hashes: Iterable[ChainHash]) -> None:
        """Blocks were sealed in a host pool beside a card."""
        backlog = self._backlogs.setdefault(pool.pool_id, deque(maxlen=MAX_BACKLOG))
        backlog.extend(TierKey(namespace, one) for one in hashes)
        self._pump(pool)

    def memory_ready(self) -> None:
        """Goes on with what had no block to go into."""
        for pool in self._pools():
            if self._backlogs.get(pool.pool_id):
                self._pump(pool)

    def _pump(self, pool: Pool) -> None:
        """Begins as many copies as may be under way."""
        target, backlog = pool.source, self._backlogs[pool.pool_id]
        if target is None:
            backlog.clear()
            return
        jobs: list[Carry] = []
        refused = False
        while backlog and self._in_flight_nbytes < self._max_nbytes:
            due = backlog[0]
            (block,) = pool.without_copy((due.chain_hash,)) or (None,)
            namespace = target.namespaces.get(due.namespace)
            if block is None or namespace is None:
                backlog.popleft()  # it is gone, or on its way already
                continue
            if self._homes.of(target).lost is not None:
                self._leave(pool, backlog.popleft())
                continue
            if target.expects(due.chain_hash):
                # Somebody else computed it there, or it comes up from below: as good as copied.
                pool.complete_spill(pool.begin_spill(block), True)
                self.counters["written_back_twice"] += 1
                backlog.popleft()
                continue
            ticket = target.begin_fill(namespace, due.chain_hash)
            if isinstance(ticket, Grow):
                grown = self._grow(target)
                if grown == "later":
                    break
                if grown == "refused":
                    if refused:
                        self._leave(pool, backlog.popleft())
                    refused = True
                continue
            backlog.popleft()
            if ticket is None:
                self._leave(pool, due)
            else:
                jobs.append(self._job(pool, target, pool.begin_spill(block), ticket))
        self._mover.submit(jobs)

    def _job(self, pool: Pool, target: Pool, spill: SpillTicket, fill: FillTicket) -> Carry:
        self._in_flight_nbytes += pool.block_nbytes

        def on_done(job: Carry) -> None:
            self._in_flight_nbytes -= pool.block_nbytes
            ok = job.error is None
            # The card's block says first whether it stands: a flush may have come meanwhile.
            target.complete_fill(fill, ok, has_copy_below=False, checksum=spill.checksum)
            pool.complete_spill(spill, ok)
            if ok:
                self.counters["written_back"] += 1
                self._on_there(target, spill.namespace, spill.hash)
            elif isinstance(job.error, BlockCorrupt):
                _log.error("pool %d: block %d does not hold what its writer sealed; dropped", pool.pool_id, spill.block)
                pool.forget_corrupt(spill.hash)
            else:
                self._leave(pool, TierKey(spill.namespace, spill.hash))
            self._pump(pool)

        return Carry(
            fill,
            self._table.memory(pool, spill.block),
            self._table.memory(target, fill.block),
            on_done,
            checksum=spill.checksum,
            rank=Rank.SPILL,
        )

    def _leave(self, pool: Pool, key: TierKey) -> None:
        self.counters["not_written_back"] += 1
        self._on_left(pool, key.namespace, key.chain_hash)
