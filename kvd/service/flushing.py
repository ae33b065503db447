"""Makes namespaces unfindable, here and below: by request, or because somebody else flushed them in a shared tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from functools import partial

from kvd.block import NamespaceDigest
from kvd.mover import Flush, ListNames, Mover
from kvd.pool import Pool
from kvd.service.lineage import Lineage, Lineages
from kvd.tiers.names import NamespaceName

MAX_TRIES = 3
"""Of a flush whose thread dies of a defect, before whoever asked for it is told so."""
_log = logging.getLogger(__name__)


class FlushResult:
    """Grows as the tiers are told; `num_open` is 0 once all of them answered."""

    def __init__(self, num_namespaces: int) -> None:
        self.num_namespaces = num_namespaces
        self.num_blocks = 0
        """Blocks that the pools forgot."""
        self.num_open = num_namespaces
        """Answers that are still to come."""
        self.untold: set[str] = set()
        """Tiers that could not be told yet, and will be before anything else."""
        self.unlisted: set[str] = set()
        """Tiers that could not say which other namespaces they hold: those are flushed nowhere."""


@dataclass(slots=True)
class _Owed:
    """A flush whose job was lost."""

    digest: NamespaceDigest
    lineage: Lineage | None
    """Which counts it as on its way, until the tiers were told."""
    levels: frozenset[int] | None


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
        self._owed: list[_Owed] = []

    def flush(
        self,
        namespaces: Iterable[NamespaceDigest],
        on_done: Callable[[FlushResult], None],
        *,
        level: int | None = None,
        choose: Callable[[NamespaceName], bool] | None = None,
    ) -> FlushResult:
        """Everywhere, or with `level` in one tier only, which then leaves the pools alone.

        With `choose` the tiers are asked what else they hold, and the namespaces it takes are flushed too.
        """
        result = FlushResult(0)
        if choose is not None:
            result.num_open = 1
        digests = list(namespaces)
        self._flush(digests, result, on_done, level)
        if choose is not None:
            self._flush_listed(set(digests), choose, result, on_done, level)
        return result

    def _flush(
        self,
        digests: Collection[NamespaceDigest],
        result: FlushResult,
        on_done: Callable[[FlushResult], None],
        level: int | None,
    ) -> None:
        result.num_namespaces += len(digests)
        result.num_open += len(digests)
        if level is None:
            result.num_blocks += sum(pool.drop_namespaces(digests) for pool in self._pools())
        self._mover.submit([self._begin(digest, result, on_done, level) for digest in digests])

    def _flush_listed(
        self,
        known: Container[NamespaceDigest],
        choose: Callable[[NamespaceName], bool],
        result: FlushResult,
        on_done: Callable[[FlushResult], None],
        level: int | None,
    ) -> None:
        asked = self._names(level)

        def listed(job: ListNames) -> None:
            result.unlisted.update(job.result.silent if job.error is None else asked)
            chosen = {name.namespace: None for name in job.result.names if choose(name)}
            self._flush([one for one in chosen if one not in known], result, on_done, level)
            result.num_open -= 1
            if not result.num_open:
                on_done(result)

        self._mover.submit([ListNames(listed, levels=_levels(level))])

    def _names(self, level: int | None) -> tuple[str, ...]:
        names = self._mover.stack.names
        return names if level is None else (names[level],)

    def opened(self, lineage: Lineage) -> None:
        """A namespace is new here: a flush of it that a defect kept from the tiers holds for it, too."""
        for owed in self._owed:
            if owed.digest == lineage.digest and owed.lineage is None:
                owed.lineage = lineage
                self._lineages.flushing(lineage)

    def retry(self) -> None:
        """Now and then: tells the tiers of flushes that a defect kept from them; so long nothing of those is read."""
        owed, self._owed = self._owed, []
        for one in owed:
            self._mover.submit([self._job(one.digest, one.lineage, partial(self._retried, one), one.levels)])

    def _retried(self, owed: _Owed, job: Flush) -> None:
        if job.error is None:
            self._told(owed.lineage, job)
        else:
            self._owed.append(owed)

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
            self._tell_others(lineage, others)

    def _tell_others(self, lineage: Lineage, levels: frozenset[int]) -> None:
        owed = _Owed(lineage.digest, lineage, levels)
        self._mover.submit([self._job(owed.digest, lineage, partial(self._retried, owed), levels)])

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

        levels = _levels(level)
        num_tries = 0

        def finish(job: Flush) -> None:
            nonlocal num_tries
            num_tries += 1
            if job.error is None:
                self._told(lineage, job)
                result.untold.update(job.result.untold)
            elif num_tries < MAX_TRIES and not job.cancelled:
                self._mover.submit([self._job(digest, lineage, finish, levels)])
                return
            else:
                # Without an end of the job nobody can say which tiers heard of it.
                result.untold.update(self._names(level))
                self._owed.append(_Owed(digest, lineage, levels))
            result.num_open -= 1
            if not result.num_open:
                on_done(result)

        return self._job(digest, lineage, finish, levels)

    def _job(
        self,
        digest: NamespaceDigest,
        lineage: Lineage | None,
        on_done: Callable[[Flush], None],
        levels: frozenset[int] | None,
    ) -> Flush:
        name = None if lineage is None else lineage.name
        return Flush(digest, self._mover.stack.unknown, on_done, levels=levels, name=name)

    def _told(self, lineage: Lineage | None, job: Flush) -> None:
        if lineage is None:
            return
        self._lineages.flushed(lineage, job.result.generations)
        if None in job.result.generations and not lineage.num_flushing:
            self._lineages.learn(lineage)


def _levels(level: int | None) -> frozenset[int] | None:
    return None if level is None else frozenset({level})
