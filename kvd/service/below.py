"""What the service does with the tiers below, behind one object: it asks, brings up, copies down, flushes."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvd.block import ChainHash, NamespaceDigest
from kvd.layout import KVLayout
from kvd.mover import Lookup, Measure, Mover
from kvd.pool import Pool, Pools
from kvd.service.attempts import Attempt, BeginAttempt
from kvd.service.flushing import Flushing
from kvd.service.forgetting import Forgetting
from kvd.service.homes import Homes
from kvd.service.lineage import Lineage, Lineages
from kvd.service.pool_rules import PoolPolicy
from kvd.service.progress import Progress
from kvd.service.promotion import Promotions
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Cache
from kvd.service.settings import TierSettings
from kvd.service.spilling import Spilling
from kvd.service.write_back import WriteBack
from kvd.status import MoverStatus, TierStatus
from kvd.tiers.base import TierKey
from kvd.tiers.names import NamespaceName, name_of

_log = logging.getLogger(__name__)


class Below:
    """Loop thread only; nothing here waits for a tier. Only what the mover gives back changes the pools."""

    def __init__(
        self,
        *,
        mover: Mover,
        pools: Pools,
        homes: Homes,
        table: SegmentTable,
        progress: Progress,
        settings: TierSettings,
        policy_of: Callable[[Pool], PoolPolicy],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._mover = mover
        self._pools = pools
        self._progress = progress
        self._settings = settings
        self._policy_of = policy_of
        self._clock = clock
        self._numbers = itertools.count(-1, -1)  # never one of a promotion's
        self._learning: dict[NamespaceDigest, int] = {}
        """Where those wait who open a namespace for the first time."""
        self._poll_at_s = self._measure_at_s = clock()

        def is_lost(pool: Pool) -> bool:
            return homes.of(pool).lost is not None

        self.lineages = Lineages(
            mover,
            on_learnt=self._learnt,
            on_flushed=self._flushed_unseen,
        )
        self.promotions = Promotions(
            mover=mover,
            lineages=self.lineages,
            table=table,
            grow=progress.growth.for_promotion,
            resume=progress.answered_below,
            drops_below=lambda pool: policy_of(pool).after_promote == "drop",
            is_lost=is_lost,
        )
        self.flushing = Flushing(mover, self.lineages, lambda: pools.all)
        self.spilling = Spilling(
            mover=mover,
            lineages=self.lineages,
            table=table,
            pools=lambda: pools.all,
            settings=settings,
            policy_of=policy_of,
            is_lost=is_lost,
            clock=clock,
            on_stale=self.flushing.stale,
        )
        self.write_back = WriteBack(
            mover=mover,
            homes=homes,
            table=table,
            pools=lambda: pools.all,
            grow=progress.growth.for_promotion,
            on_there=self._written_back,
            on_left=self._left,
            max_nbytes=settings.max_spilling_nbytes,
            counters=counters,
        )
        self.forgetting = Forgetting(mover, self.spilling)
        progress.promotions = self.promotions
        progress.on_memory = self.memory_ready
        progress.on_served = self._served

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Nearest first."""
        return self._mover.stack.names

    @property
    def next_deadline_s(self) -> float:
        """When `tick` has something to do."""
        rest_until_s = self.spilling.next_deadline_s
        return self._poll_at_s if rest_until_s is None else min(self._poll_at_s, rest_until_s)

    def open(self, cache: Cache, layout: KVLayout) -> int | None:
        """A namespace is used. Where to wait for its generations, None when they are there or nobody answers."""
        is_new = self.lineages.get(cache.digest) is None
        lineage = self.lineages.open(cache.pool, cache.digest, layout.itemsize, _name(cache))
        if cache.pool.source is not None:
            self.lineages.open(cache.pool.source, cache.digest, layout.itemsize, _name(cache))
        if is_new:
            self.flushing.opened(lineage)
        if lineage.was_learnt or not self._mover.stack.is_answering():
            return None
        return self._learning.setdefault(cache.digest, next(self._numbers))

    def sealed(self, pool: Pool, namespace: NamespaceDigest, hashes: Sequence[ChainHash]) -> None:
        """A session sealed blocks: they go where its pool's blocks are copied to."""
        if pool.source is not None:
            self.write_back.sealed(pool, namespace, hashes)
            self.spilling.look_at(pool)
        else:
            self.spilling.sealed(pool, namespace, hashes)

    def memory_ready(self) -> None:
        """A stock has made something, failed, or forgot what it was asked for: goes on with what waits for memory."""
        self.promotions.memory_ready()
        self.write_back.memory_ready()

    def busy_namespaces(self) -> set[NamespaceDigest]:
        """Those that something below is under way for, whoever asked for it."""
        return self.lineages.busy() | self.promotions.busy_namespaces()

    def prefetch(self, cache: Cache, hashes: Sequence[ChainHash]) -> None:
        """Brings up what follows the resident prefix; nobody waits."""
        self.promotions.start(cache, hashes, cache.pool.match(hashes), waited_for=False)

    def reach(self, cache: Cache, hashes: Sequence[ChainHash]) -> Reach:
        """Asks how far the tiers continue the resident prefix; wait at `number` for the answer."""
        reach = Reach(next(self._numbers), cache.pool, hashes, len(self.tier_names))
        if reach.num_resident == len(hashes):
            reach.number, reach.places = None, [None] * len(hashes)
            return reach
        lineage = self.lineages.get(cache.digest)
        if lineage is None or lineage.num_flushing or not self._mover.stack.is_answering():
            reach.number = None
            return reach

        def on_done(job: Lookup) -> None:
            if job.error is None:
                reach.places = job.places
            if reach.number is not None:
                self._progress.answered_below(reach.number)

        self._mover.submit([Lookup([TierKey(cache.digest, chain_hash) for chain_hash in hashes], on_done)])
        return reach

    def find_last(self, cache: Cache, hashes: Sequence[ChainHash]) -> LastSearch:
        """Asks which is the last of the hashes that anything here or below has; wait at `number` for the answer."""
        search = LastSearch(cache.pool, hashes)
        asked = hashes[search.place + 1 :]
        lineage = self.lineages.get(cache.digest)
        if not asked or lineage is None or lineage.num_flushing or not self._mover.stack.is_answering():
            return search
        number = search.number = next(self._numbers)
        first = search.place + 1

        def on_done(job: Lookup) -> None:
            if job.error is None:
                search.below = max((first + i for i, place in enumerate(job.places) if place is not None), default=-1)
            self._progress.answered_below(number)

        self._mover.submit([Lookup([TierKey(cache.digest, chain_hash) for chain_hash in asked], on_done)])
        return search

    def forget(self, cache: Cache, hashes: Sequence[ChainHash]) -> tuple[int, int]:
        """How many blocks left the pool, and where to wait until the tiers were told."""
        number = next(self._numbers)
        num_blocks = self.forgetting.forget(cache, hashes, lambda: self._progress.answered_below(number))
        return num_blocks, number

    def mover_done(self) -> None:
        """Takes over what the mover has done, and what it heard of other daemons."""
        for namespace in self._mover.take_flushed():
            self.flushing.flushed_elsewhere(namespace)
        for job in self._mover.take_done():
            job.finish()
        self._progress.blocks_came_back = True

    def tick(self, now_s: float) -> None:
        """Goes on after a rest; asks the tiers now and then what they hold and who flushed what."""
        self.spilling.tick(now_s)
        if now_s >= self._poll_at_s:
            self._poll_at_s = now_s + self._settings.poll_s
            self.flushing.retry()
            if self._mover.stack.is_answering():
                self.lineages.learn_all()
                if now_s >= self._measure_at_s:
                    self._measure_at_s = now_s + self._settings.measure_s
                    self._mover.submit([Measure(_ignore)])

    def blocks_moved(self, pools: Iterable[Pool]) -> None:
        """Blocks were taken, or became idle."""
        for pool in pools:
            self.spilling.look_at(pool)

    def statuses(self) -> list[TierStatus]:
        """Of the tiers, nearest first."""
        return self._mover.stack.statuses()

    def mover_status(self) -> MoverStatus:
        """Of the mover."""
        return self._mover.status()

    def drain(self, wait: Callable[[float], object]) -> None:
        """See `Service.drain`."""

        def wait_for_mover(seconds: float) -> None:
            wait(seconds)
            self.mover_done()

        num_copied, num_left = self.spilling.drain(wait_for_mover)
        if num_copied or num_left:
            _log.info("%d blocks copied down, %d without a copy are lost", num_copied, num_left)

    def close(self) -> None:
        """The mover is closed: what it gave back is the end of every copy."""
        self.spilling.stop()
        self.mover_done()

    def _served(self, attempt: Attempt) -> None:
        """A request took blocks."""
        pool = attempt.cache.pool
        if pool.source is None and isinstance(attempt, BeginAttempt):
            num_cached = pool.match(attempt.wanted) if self._policy_of(pool).spill == "on_second_hit" else 0
            self.spilling.found(pool, attempt.cache.digest, attempt.wanted[:num_cached])
        self.spilling.look_at(pool)

    def _flushed_unseen(self, lineage: Lineage, levels: frozenset[int]) -> None:
        self.flushing.flushed_unseen(lineage, levels)

    def _learnt(self, lineage: Lineage) -> None:
        number = self._learning.pop(lineage.digest, None)
        if number is not None:
            self._progress.answered_below(number)
        for pool in lineage.pools:
            self.spilling.look_at(pool)

    def _written_back(self, pool: Pool, namespace: NamespaceDigest, chain_hash: ChainHash) -> None:
        self.spilling.sealed(pool, namespace, (chain_hash,))

    def _left(self, pool: Pool, namespace: NamespaceDigest, chain_hash: ChainHash) -> None:
        self.spilling.sealed(pool, namespace, (chain_hash,))


class Reach:
    """How far a prefix reaches in the pool, and with each tier's help; filled in when the tiers answer."""

    def __init__(self, number: int | None, pool: Pool, hashes: Sequence[ChainHash], num_tiers: int) -> None:
        self.number = number
        """Where to wait for it; None when nobody will answer."""
        self.places: list[int | None] | None = None
        """The nearest tier of each block, once known."""
        self._pool = pool
        self._hashes = hashes
        self._num_tiers = num_tiers

    @property
    def num_resident(self) -> int:
        """Blocks of the prefix in the pool, now."""
        source = self._pool.source
        num_here = self._pool.match(self._hashes)
        # What the card beside has comes as soon as it is wanted.
        return num_here if source is None else num_here + source.match(self._hashes[num_here:])

    def by_tier(self) -> list[int]:
        """For each tier the length of the prefix that the pool, it and the tiers before it have together."""
        if self.places is None:
            return []
        reach = []
        for level in range(self._num_tiers):
            length = 0
            for chain_hash, place in zip(self._hashes, self.places, strict=True):
                if not (self._expects(chain_hash) or (place is not None and place <= level)):
                    break
                length += 1
            reach.append(length)
        return reach

    def _expects(self, chain_hash: ChainHash) -> bool:
        source = self._pool.source
        return self._pool.expects(chain_hash) or (source is not None and source.expects(chain_hash))


class LastSearch:
    """Which is the last of some hashes that is known here; filled in when the tiers answer."""

    def __init__(self, pool: Pool, hashes: Sequence[ChainHash]) -> None:
        self.number: int | None = None
        """Where to wait for it; None when nobody will answer."""
        self.below = -1
        """The last that a tier has, of those behind the last one here."""
        self._pool = pool
        self._hashes = hashes

    @property
    def place(self) -> int:
        """Its place; -1 for none."""
        return max(self.below, self._pool.last_expected(self._hashes))


def _ignore(_job: Measure) -> None:
    """What the tiers hold shows in their status."""


def _name(cache: Cache) -> NamespaceName:
    words = cache.namespace.words
    return name_of(
        cache.digest, tenant=cache.pool.tenant, model=words.model, engine=words.engine, adapter=words.adapter
    )
