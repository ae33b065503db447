"""Which generation each namespace is in below: what a spill must name, learnt before a block is sealed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvd.block import NamespaceDigest
from kvd.mover import Learn, Mover
from kvd.pool import Pool
from kvd.tiers.base import Generation
from kvd.tiers.names import NamespaceName
from kvd.tiers.stack import Generations


class Lineage:
    """One namespace, as the tiers below know it."""

    __slots__ = (
        "digest",
        "excused",
        "generations",
        "is_learning",
        "itemsize",
        "last_known",
        "name",
        "num_flushes",
        "num_flushing",
        "pools",
        "was_learnt",
    )

    def __init__(self, digest: NamespaceDigest, itemsize: int, name: NamespaceName, unknown: Generations) -> None:
        self.pools: list[Pool] = []
        """Those it was opened in; several where pool rules tell its users apart, or where one stands beside a card."""
        self.digest = digest
        self.itemsize = itemsize
        """Bytes of one number of its KV, which helps the codecs."""
        self.name = name
        """Kept by the tiers beside the generation."""
        self.generations = unknown
        """What a spill may name now; None for a tier that must be asked first."""
        self.last_known: dict[int, Generation] = {}
        """Of each tier the last generation it was known to be in."""
        self.excused: set[int] = set()
        """Tiers whose next generation begins with a flush that the pool knows of already."""
        self.is_learning = False
        self.was_learnt = False
        """Whether the first answer came, good or bad."""
        self.num_flushes = 0
        """Counts up at every flush of it that this daemon does or hears of: what was asked before is void."""
        self.num_flushing = 0
        """Flushes on their way to the tiers; until they are there, nothing of it is read from below."""

    def expect_flush(self) -> None:
        """The pool has forgotten everything for a flush that the tiers have heard of, or will."""
        self.num_flushes += 1
        self.excused.update(range(len(self.generations)))
        self.generations = (None,) * len(self.generations)

    def take(self, generations: Generations, began_with_flush: Sequence[bool]) -> frozenset[int]:
        """What the tiers say now; those of them that were flushed without our knowing."""
        flushed = set()
        for level, (new, began_so) in enumerate(zip(generations, began_with_flush, strict=True)):
            if new is None:
                continue
            if began_so and level not in self.excused and new != self.last_known.get(level):
                flushed.add(level)
            self.last_known[level] = new
            self.excused.discard(level)
        self.generations = generations
        return frozenset(flushed)

    @property
    def may_spill(self) -> bool:
        """Whether any tier's generation is known, and no flush is about to change it."""
        return not self.num_flushing and any(one is not None for one in self.generations)


class Lineages:
    """The namespaces that somebody opened. Loop thread only.

    Why this keeps a flush final: every block found by hash was sealed in the generations known here. Whatever ends one,
    a flush of ours or one we hear of, first makes all of its blocks unfindable in the pool; and so does learning of a
    generation that began with a flush when we knew another, or none yet.
    """

    def __init__(
        self,
        mover: Mover,
        *,
        on_learnt: Callable[[Lineage], None],
        on_flushed: Callable[[Lineage, frozenset[int]], None],
    ) -> None:
        """`on_flushed` makes the namespace unfindable outside of those tiers: it was flushed, we cannot tell when."""
        self._mover = mover
        self._on_learnt = on_learnt
        self._on_flushed = on_flushed
        self._by_digest: dict[NamespaceDigest, Lineage] = {}

    def open(self, pool: Pool, digest: NamespaceDigest, itemsize: int, name: NamespaceName) -> Lineage:
        """The namespace is used in that pool from now on; the first time, its generations are asked."""
        found = self._by_digest.get(digest)
        if found is None:
            found = self._by_digest[digest] = Lineage(digest, itemsize, name, self._mover.stack.unknown)
            self.learn(found)
        if pool not in found.pools:
            found.pools.append(pool)
        return found

    def get(self, digest: NamespaceDigest) -> Lineage | None:
        """None for a namespace nobody opened since the daemon's start."""
        return self._by_digest.get(digest)

    def busy(self) -> set[NamespaceDigest]:
        """Those that a question or a flush is under way for."""
        return {digest for digest, one in self._by_digest.items() if one.is_learning or one.num_flushing}

    def forget(self, digests: Iterable[NamespaceDigest]) -> None:
        """Nobody uses these and no block is of them; opened again, their generations are asked again."""
        for digest in digests:
            self._by_digest.pop(digest, None)

    def may_spill(self, digest: NamespaceDigest) -> bool:
        """Whether blocks of the namespace can go down now."""
        lineage = self._by_digest.get(digest)
        return lineage is not None and lineage.may_spill

    def learn(self, lineage: Lineage) -> None:
        """Asks the tiers again; blocks go on under what is known until they answer."""
        self._learn([lineage])

    def learn_all(self) -> None:
        """Which also tells whether somebody else flushed one of them meanwhile."""
        self._learn(self._by_digest.values())

    def _learn(self, lineages: Iterable[Lineage]) -> None:
        unknown, jobs = self._mover.stack.unknown, []
        for lineage in lineages:
            if not lineage.is_learning:
                lineage.is_learning = True
                on_done = self._learnt(lineage, lineage.num_flushes)
                jobs.append(Learn(lineage.digest, unknown, on_done, name=lineage.name))
        # Together: there may be ten thousand, and each submission wakes the mover's threads.
        if jobs:
            self._mover.submit(jobs)

    def flushing(self, lineage: Lineage) -> None:
        """A flush is on its way to the tiers."""
        lineage.expect_flush()
        lineage.num_flushing += 1

    def flushed(self, lineage: Lineage, generations: Generations) -> None:
        """It got there; the generations are those after it."""
        lineage.num_flushing -= 1
        if not lineage.num_flushing:
            lineage.take(generations, [False] * len(generations))
            self._on_learnt(lineage)

    def flushed_elsewhere(self, lineage: Lineage) -> None:
        """Somebody else flushed it: nothing is spilled until the new generations are known."""
        lineage.expect_flush()
        self.learn(lineage)

    def _learnt(self, lineage: Lineage, num_flushes: int) -> Callable[[Learn], None]:
        def on_done(job: Learn) -> None:
            lineage.is_learning = False
            lineage.was_learnt = True
            if lineage.num_flushing:
                pass  # the flush itself brings the generations after it
            elif lineage.num_flushes != num_flushes:
                self.learn(lineage)  # it may have been answered before the flush
            elif job.error is None:
                flushed = lineage.take(job.generations, job.flushed)
                if flushed:
                    self._on_flushed(lineage, flushed)
            self._on_learnt(lineage)

        return on_done
