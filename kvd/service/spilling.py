"""Copies blocks down before they must go: which ones, how many at a time, and when to rest."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kvd.block import BlockId, ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt, StaleGeneration
from kvd.mover import Mover, Spill
from kvd.pool import Pool
from kvd.service.lineage import Lineages
from kvd.service.pool_rules import PoolPolicy
from kvd.service.segments import SegmentTable
from kvd.service.settings import TierSettings
from kvd.tiers.base import TierKey

MAX_BACKLOG = 1 << 16
"""Hashes remembered to be copied down soon; older ones are left to the watermarks."""
MAX_LOOKED_AT = 256
"""Hashes of the backlog that one call looks at."""
MAX_REFUSED = 8
"""Those of them whose namespace cannot be copied just now, after which the call looks no further."""
MAX_SHARE_DIVISOR = 4
"""At most a quarter of a pool's blocks is on the way down."""
_log = logging.getLogger(__name__)


class _Shelf:
    """What spilling knows of one pool."""

    def __init__(self) -> None:
        self.backlog: deque[TierKey] = deque(maxlen=MAX_BACKLOG)
        self.seen_once: dict[ChainHash, None] = {}
        """Hashes one begin has found, oldest first."""
        self.is_short = False
        """Between the low watermark and the high one."""
        self.copies_all = False
        """Somebody asked for everything to be copied down."""
        self.in_flight: dict[int, Spill] = {}


class Spilling:
    """Best effort: a copy that fails leaves its block, which is then dropped and counted when room is needed.

    `on_stale(namespace, flushed)` is told when a tier says that the namespace is in another generation. A pool that
    `is_lost`, with its card, is left alone: nothing can be read there, and no tier is to blame. Loop thread only.
    """

    def __init__(
        self,
        *,
        mover: Mover,
        lineages: Lineages,
        table: SegmentTable,
        pools: Callable[[], Iterable[Pool]],
        settings: TierSettings,
        policy_of: Callable[[Pool], PoolPolicy],
        is_lost: Callable[[Pool], bool],
        clock: Callable[[], float],
        on_stale: Callable[[NamespaceDigest, bool], None],
    ) -> None:
        self._mover = mover
        self._lineages = lineages
        self._table = table
        self._pools = pools
        self._settings = settings
        self._policy_of = policy_of
        self._is_lost = is_lost
        self._clock = clock
        self._on_stale = on_stale
        self._shelves: dict[int, _Shelf] = {}
        self._in_flight_nbytes = 0
        self._rest_until_s: float | None = None
        self._draining = False
        self.on_copied: Callable[[Spill], None] | None = None
        """Told of every copy that ended, well or not."""

    @property
    def next_deadline_s(self) -> float | None:
        """When a rest is over."""
        return self._rest_until_s

    def sealed(self, pool: Pool, namespace: NamespaceDigest, hashes: Iterable[ChainHash]) -> None:
        """Blocks were sealed."""
        if self._policy_of(pool).spill == "write_through":
            self._shelf(pool).backlog.extend(TierKey(namespace, one) for one in hashes)
        self.look_at(pool)

    def copy_soon(self, pool: Pool, namespace: NamespaceDigest, hashes: Iterable[ChainHash]) -> None:
        """Whatever the policy: a crash is not to lose these blocks."""
        self._shelf(pool).backlog.extend(TierKey(namespace, one) for one in hashes)
        self.look_at(pool)

    def found(self, pool: Pool, namespace: NamespaceDigest, hashes: Sequence[ChainHash]) -> None:
        """A begin found these blocks resident."""
        if self._policy_of(pool).spill != "on_second_hit" or not hashes:
            return
        shelf = self._shelf(pool)
        for chain_hash in hashes:
            if chain_hash in shelf.seen_once:
                shelf.backlog.append(TierKey(namespace, chain_hash))
                del shelf.seen_once[chain_hash]
            else:
                shelf.seen_once[chain_hash] = None
        for chain_hash in list(shelf.seen_once)[: max(0, len(shelf.seen_once) - MAX_BACKLOG)]:
            del shelf.seen_once[chain_hash]

    def spill_all(self, pool: Pool) -> None:
        """Copies down everything idle that has no copy yet."""
        self._shelf(pool).copies_all = True
        self.look_at(pool)

    @property
    def may_copy(self) -> bool:
        """Whether copying down is of any use now."""
        return not self._draining and bool(self._mover.stack.tiers) and self._mover.stack.is_answering()

    def accepts(self, namespace: NamespaceDigest) -> bool:
        """Whether blocks of the namespace can be copied down now."""
        return self._lineages.may_spill(namespace)

    def copy_blocks(self, pool: Pool, blocks: Sequence[BlockId]) -> None:
        """Begins to copy idle blocks down that are about to go, as many as may be under way."""
        if self._rest_until_s is None:
            shelf = self._shelf(pool)
            self._copy(pool, shelf, blocks[: max(0, self._room(pool, shelf))], lasting_only=False)

    def look_at(self, pool: Pool) -> None:
        """After whatever may have made blocks scarce, or idle: begins the copies that are due. O(1) if none are."""
        if not self._mover.stack.tiers:
            return
        shelf = self._shelves.get(pool.pool_id) or self._shelf(pool)
        num_attainable = pool.num_attainable
        if self._policy_of(pool).spill == "on_second_hit":
            shelf.is_short = False
        else:
            num_expendable = pool.num_expendable
            if shelf.is_short:
                shelf.is_short = num_expendable < self._settings.high_watermark * num_attainable
            else:
                shelf.is_short = num_expendable < self._settings.low_watermark * num_attainable
        if self._rest_until_s is not None or self._draining:
            return
        if shelf.backlog:
            self._copy_backlog(pool, shelf)
        if shelf.is_short or shelf.copies_all:
            num_wanted = num_attainable
            if not shelf.copies_all:
                missing = self._settings.high_watermark * num_attainable - pool.num_expendable
                num_wanted = math.ceil(missing) - len(shelf.in_flight)
            self._copy_idle(pool, shelf, num_wanted)

    def being_copied(self, pool: Pool, hashes: Collection[ChainHash]) -> list[Spill]:
        """The copies of these blocks that are under way."""
        return [job for job in self._shelf(pool).in_flight.values() if job.key.chain_hash in hashes]

    def tick(self, now_s: float) -> None:
        """Goes on after a rest."""
        if self._rest_until_s is not None and self._rest_until_s <= now_s:
            self._rest_until_s = None
            for pool in self._pools():
                self.look_at(pool)

    def stop(self) -> None:
        """From now on nothing is begun but by `drain`."""
        self._draining = True

    def drain(self, wait: Callable[[float], None]) -> tuple[int, int]:
        """For a clean stop: copies what is idle and has no copy to the tiers that outlive us, the newest first.

        `wait(seconds)` waits for the mover and finishes what it gives back. Returns the blocks copied, and those left
        without a copy. Bounded by `drain_s`; given up at the second failure with nothing copied in between, or when no
        tier answers.
        """
        self.stop()
        until_s = self._clock() + self._settings.drain_s
        pools = [pool for pool in self._pools() if pool.num_uncopied]
        if not pools or not self._mover.stack.has_lasting:
            return 0, sum(pool.num_uncopied for pool in pools)
        num_at_start = sum(pool.num_uncopied for pool in pools)
        _log.info("copying %d blocks to the tiers that outlive this daemon", num_at_start)
        told_s = self._clock()
        failed_at: tuple[float, int] | None = None
        while (now_s := self._clock()) < until_s:
            if self._rest_until_s is not None and self._rest_until_s <= now_s:
                self._rest_until_s = None
            if self._rest_until_s is None:
                for pool in pools:
                    shelf = self._shelf(pool)
                    self._copy_idle(pool, shelf, pool.num_uncopied, newest_first=True, lasting_only=True)
            if not any(self._shelf(pool).in_flight for pool in pools):
                if self._rest_until_s is None or not self._mover.stack.is_answering():
                    break
                failure = self._rest_until_s, sum(pool.num_uncopied for pool in pools)
                if failed_at is not None and failed_at[0] != failure[0] and failed_at[1] == failure[1]:
                    break
                failed_at = failure
            if now_s - told_s >= 1.0:
                told_s = now_s
                _log.info("%d of %d blocks left to copy", sum(pool.num_uncopied for pool in pools), num_at_start)
            wait(min(until_s - now_s, self._settings.retry_s))
        num_left = sum(pool.num_uncopied for pool in pools)
        return max(0, num_at_start - num_left), num_left

    def _shelf(self, pool: Pool) -> _Shelf:
        return self._shelves.setdefault(pool.pool_id, _Shelf())

    def _room(self, pool: Pool, shelf: _Shelf) -> int:
        """Blocks that may begin their way down now; one at least when nothing is under way, none of a lost pool.

        A block being copied cannot be evicted, so a pool never has more than a small share of its blocks on the way.
        """
        if self._is_lost(pool):
            return 0
        by_bytes = (self._settings.max_spilling_nbytes - self._in_flight_nbytes) // pool.block_nbytes
        by_share = pool.num_attainable // MAX_SHARE_DIVISOR - len(shelf.in_flight)
        return max(min(by_bytes, by_share), 0 if self._in_flight_nbytes else 1)

    def _copy_backlog(self, pool: Pool, shelf: _Shelf) -> None:
        room = self._room(pool, shelf)
        num_refused = 0
        for _ in range(min(len(shelf.backlog), MAX_LOOKED_AT)):
            if room <= 0:
                return
            due = shelf.backlog.popleft()
            if not self._lineages.may_spill(due.namespace):
                # It goes to the end, so that a namespace in trouble does not keep the others from their turn. But most
                # likely none can be copied now, which is soon found out.
                shelf.backlog.append(due)
                num_refused += 1
                if num_refused == MAX_REFUSED:
                    return
                continue
            room -= self._copy(pool, shelf, pool.without_copy((due.chain_hash,)), lasting_only=False)

    def _copy_idle(
        self, pool: Pool, shelf: _Shelf, num_wanted: int, *, newest_first: bool = False, lasting_only: bool = False
    ) -> None:
        limit = min(num_wanted, self._room(pool, shelf))
        if limit <= 0:
            return
        blocks = pool.spill_candidates(limit, newest_first=newest_first, accept=self._lineages.may_spill)
        num_copied = self._copy(pool, shelf, blocks, lasting_only=lasting_only)
        if not num_copied and not shelf.in_flight:
            shelf.copies_all = False

    def _copy(self, pool: Pool, shelf: _Shelf, blocks: Iterable[BlockId], *, lasting_only: bool) -> int:
        jobs = []
        for block in blocks:
            ticket = pool.begin_spill(block)
            lineage = self._lineages.get(ticket.namespace)
            if lineage is None or not lineage.may_spill:
                pool.complete_spill(ticket, False)
                continue

            def on_done(job: Spill) -> None:
                del shelf.in_flight[job.ticket.generation]
                self._in_flight_nbytes -= pool.block_nbytes
                self._copied(pool, job)

            job = Spill(
                ticket,
                self._table.memory(pool, block),
                lineage.generations,
                on_done,
                itemsize=lineage.itemsize,
                lasting_only=lasting_only,
            )
            shelf.in_flight[ticket.generation] = job
            self._in_flight_nbytes += pool.block_nbytes
            jobs.append(job)
        self._mover.submit(jobs)
        return len(jobs)

    def _copied(self, pool: Pool, job: Spill) -> None:
        error = job.error
        pool.complete_spill(job.ticket, error is None)
        if isinstance(error, BlockCorrupt):
            _log.error(
                "pool %d: block %d does not hold what its writer sealed; dropped", pool.pool_id, job.ticket.block
            )
            pool.forget_corrupt(job.ticket.hash)
        elif isinstance(error, StaleGeneration):
            lineage = self._lineages.get(job.ticket.namespace)
            # A flush of ours has given it another generation since; then there is nothing new in this.
            if lineage is not None and lineage.generations == job.generations:
                self._on_stale(job.ticket.namespace, error.cause == "flushed")
        elif error is not None and not job.cancelled and not self._is_lost(pool):
            self._rest_until_s = self._clock() + self._settings.retry_s
        if error is not None and self._policy_of(pool).spill != "on_evict" and not isinstance(error, BlockCorrupt):
            self._shelf(pool).backlog.appendleft(job.key)  # or it would wait for the watermarks
        if self.on_copied is not None:
            self.on_copied(job)
        if not job.cancelled:
            self.look_at(pool)
