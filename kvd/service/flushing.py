"""Makes namespaces unfindable, here and below: by request, or because somebody else flushed them in a shared tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvd.block import NamespaceDigest
from kvd.mover import Flush, Mover
from kvd.pool import Pool
from kvd.service.lineage import Lineage, Lineages

_log = logging.getLogger(__name__)


class FlushResult:
    """Grows as the tiers are told; `num_open` is 0 once all of them answered."""

    def __init__(self, num_namespaces: int) -> None:
        self.num_namespaces = num_namespaces
        self.num_blocks = 0
        """Blocks that the pools forgot."""
        self.num_open = num_namespaces
        self.untold: set[str] = set()
        """Tiers that could not be told yet, and will be before anything else."""


class Flushing:
    """Loop thread only.

    The order that makes it final: first the pool forgets, and nothing of the namespace is asked or copied under what
    was known; then the tiers are told; only then are the new generations used. Copies that are under way end in a block
    that nobody finds, or under a generation that nobody reads.
    """

    def __init__(self, mover: Mover, lineages: Lineages, pools: Callable[[], Iterable[Pool]]) -> None:
        self._mover = mover
        self._lineages = lineages
        self._pools = pools

    def flush(
        self, namespaces: Iterable[NamespaceDigest], on_done: Callable[[FlushResult], None], *, level: int | None = None
    ) -> FlushResult:
        """Everywhere, or with `level` in one tier only, which then leaves the pools alone."""
        digests = list(namespaces)
        result = FlushResult(len(digests))
        if level is None:
            result.num_blocks = sum(pool.drop_namespaces(digests) for pool in self._pools())
        jobs = [self._begin(digest, result, on_done, level) for digest in digests]
        self._mover.submit(jobs)
        return result

    def stale(self, namespace: NamespaceDigest, flushed: bool) -> None:
        """A tier is in another generation than we knew: it was flushed by somebody else, or forgot."""
        if flushed:
            self.flushed_elsewhere(namespace)
        elif (lineage := self._lineages.get(namespace)) is not None:
            lineage.generations = self._mover.stack.unknown
            self._lineages.learn(lineage)

    def flushed_elsewhere(self, namespace: NamespaceDigest) -> None:
        """The other tiers are flushed by now; the pool follows."""
        lineage = self._lineages.get(namespace)
        if lineage is None:
            return
        self._forget_flushed(lineage)
        self._lineages.flushed_elsewhere(lineage)

    def flushed_unseen(self, lineage: Lineage, levels: frozenset[int]) -> None:
        """These tiers turn out to be in generations that began with a flush: what lies elsewhere may be older."""
        self._forget_flushed(lineage)
        lineage.num_flushes += 1
        others = frozenset(range(len(self._mover.stack.tiers))) - levels
        if others:
            self._lineages.flushing(lineage)
            unknown = self._mover.stack.unknown
            self._mover.submit([Flush(lineage.digest, unknown, lambda job: self._told(lineage, job), levels=others)])

    def _forget_flushed(self, lineage: Lineage) -> None:
        num_blocks = sum(pool.drop_namespaces((lineage.digest,)) for pool in lineage.pools)
        if num_blocks:
            _log.info("namespace %s was flushed elsewhere: %d blocks dropped", lineage.digest.hex()[:16], num_blocks)

    def _begin(
        self,
        digest: NamespaceDigest,
        result: FlushResult,
        on_done: Callable[[FlushResult], None],
        level: int | None,
    ) -> Flush:
        lineage = self._lineages.get(digest)
        if lineage is not None:
            self._lineages.flushing(lineage)

        def finish(job: Flush) -> None:
            self._told(lineage, job)
            # Without an end of the job nobody can say which tiers heard of it.
            result.untold.update(job.result.untold if job.error is None else asked)
            result.num_open -= 1
            if not result.num_open:
                on_done(result)

        names = self._mover.stack.names
        asked = names if level is None else (names[level],)
        levels = None if level is None else frozenset({level})
        return Flush(digest, self._mover.stack.unknown, finish, levels=levels)

    def _told(self, lineage: Lineage | None, job: Flush) -> None:
        if lineage is None:
            return
        self._lineages.flushed(lineage, job.result.generations)
        if None in job.result.generations and not lineage.num_flushing:
            self._lineages.learn(lineage)
