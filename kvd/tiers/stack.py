"""The lower tiers as one: nearest first. A block is read where it is nearest, and put into every tier.

So a nearer tier is a faster copy of what the one below it has: what falls out of host memory is in Redis, a restart
finds all of it, and a tier that is down costs nothing that another one took.

What this does not do: it keeps no index of what lies where (each question goes to the tiers), and it does not retry.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from kvd.block import NamespaceDigest
from kvd.errors import BlockMissing, StaleGeneration, TierError, TierUnavailable
from kvd.status import TierStatus
from kvd.tiers.base import Generation, Names, Outcome, Read, Tier, TierKey, Write
from kvd.tiers.names import NamespaceName

Generations = tuple[Generation | None, ...]
"""One namespace's generation in each tier, nearest first; None where it is not known."""
_log = logging.getLogger(__name__)


class Put(NamedTuple):
    """One block to store in every tier that takes it. As `Write`, with the generations of all tiers."""

    key: TierKey
    data: memoryview
    generations: Generations
    itemsize: int = 2


class Flushed(NamedTuple):
    """What came of a flush: the generations from now on, and the tiers that could not be told yet."""

    generations: Generations
    untold: list[str]


class Listed(NamedTuple):
    """The namespaces that tiers know by name, and the tiers that could not be asked."""

    names: list[NamespaceName]
    silent: list[str]


class Stack:
    """Called by mover threads, several at once; only `statuses` and `is_answering` are for the loop, and never wait.

    `lasting` names the tiers whose blocks outlive the daemon; the drain of a clean stop puts only there. A tier that
    fails counts as one that does not have the block; its own counters and status say why.
    """

    def __init__(self, tiers: Sequence[Tier], *, lasting: Collection[str] = ()) -> None:
        self.tiers = tuple(tiers)
        self.names = tuple(tier.name for tier in tiers)
        self._lasting = frozenset(lasting)
        self._num_asked = [0] * len(tiers)
        self._num_found = [0] * len(tiers)

    @property
    def unknown(self) -> Generations:
        """The generations of a namespace nobody asked about yet."""
        return (None,) * len(self.tiers)

    @property
    def has_lasting(self) -> bool:
        """Whether anything put below outlives the daemon."""
        return any(name in self._lasting for name in self.names)

    def is_answering(self) -> bool:
        """False while every tier is down and not due to be tried again: then asking is no use. Takes no lock."""
        return any(tier.is_answering() for tier in self.tiers)

    def statuses(self) -> list[TierStatus]:
        """Nearest first. Waits for nobody."""
        return [
            msgspec.structs.replace(tier.status(), num_asked=asked, num_found=found)
            for tier, asked, found in zip(self.tiers, self._num_asked, self._num_found, strict=True)
        ]

    def generations(self, namespaces: Sequence[NamespaceDigest], names: Names | None = None) -> list[Generations]:
        """What the tiers say now of each namespace; every tier is asked for all of them at once."""
        by_tier = [tier.generations(namespaces, names) for tier in self.tiers]
        return [tuple(told[index] for told in by_tier) for index in range(len(namespaces))]

    def flushed(self, namespace: NamespaceDigest) -> tuple[bool, ...]:
        """For each tier, whether its generation began with a flush. Asks nobody."""
        return tuple(tier.was_flushed(namespace) for tier in self.tiers)

    def locate(self, keys: Sequence[TierKey]) -> list[int | None]:
        """For each block the nearest tier that has it, as an index into `tiers`. No promise: it may be gone by then.

        Each tier is asked once, for what no nearer one has. One thread at a time.
        """
        places: list[int | None] = [None] * len(keys)
        left = list(range(len(keys)))
        for level, tier in enumerate(self.tiers):
            if not left:
                break
            self._num_asked[level] += len(left)
            try:
                present = tier.contains([keys[index] for index in left])
            except TierError:
                continue
            self._num_found[level] += sum(present)
            for index, found in zip(left, present, strict=True):
                if found:
                    places[index] = level
            left = [index for index in left if places[index] is None]
        return places

    def get_many(self, reads: Sequence[Read], places: Sequence[int]) -> list[Outcome]:
        """Fetches each block from the tier at its place, and from those below when it is not there after all."""
        outcomes: list[Outcome] = [BlockMissing("no tier has it")] * len(reads)
        for level, tier in enumerate(self.tiers):
            asked = [i for i, place in enumerate(places) if place <= level and outcomes[i] is not None]
            if asked:
                for index, outcome in zip(asked, tier.get_many([reads[i] for i in asked]), strict=True):
                    outcomes[index] = outcome
        return outcomes

    def put_many(self, puts: Sequence[Put], *, lasting_only: bool = False) -> list[Outcome]:
        """Stores each block in every tier that takes it: well when one does, else the last refusal.

        A flush that one tier has heard of is final, whatever the others say; those below are not asked.
        """
        outcomes: list[Outcome] = [
            TierUnavailable("no tier has said which generation the namespace is in", cause="generation-unknown")
        ] * len(puts)
        left = list(range(len(puts)))
        for level, tier in enumerate(self.tiers):
            if lasting_only and tier.name not in self._lasting:
                continue
            writes = [
                (i, Write(puts[i].key, puts[i].data, generation, puts[i].itemsize))
                for i in left
                if (generation := puts[i].generations[level]) is not None
            ]
            if not writes:
                continue
            for (index, _), outcome in zip(writes, tier.put_many([one for _, one in writes]), strict=True):
                if isinstance(outcome, StaleGeneration) or outcomes[index] is not None:
                    outcomes[index] = outcome
            left = [i for i in left if not isinstance(outcomes[i], StaleGeneration)]
        return outcomes

    def delete(self, keys: Sequence[TierKey]) -> bool:
        """Forgets blocks in every tier; whether all of them could be told."""
        told = True
        for tier in self.tiers:
            try:
                tier.delete(keys)
            except TierError:
                told = False
        return told

    def listed(self, *, levels: Collection[int] | None = None) -> Listed:
        """What the tiers (or the given ones) may hold blocks of, as far as it has a name."""
        found: dict[NamespaceDigest, NamespaceName] = {}
        silent = []
        for level, tier in enumerate(self.tiers):
            if levels is None or level in levels:
                try:
                    found |= {name.namespace: name for name in tier.names()}
                except TierError as error:
                    _log.warning("the %s tier does not say what it holds: %s", tier.name, error)
                    silent.append(tier.name)
        return Listed(list(found.values()), silent)

    def flush(
        self, namespace: NamespaceDigest, *, levels: Collection[int] | None = None, names: Names | None = None
    ) -> Flushed:
        """`flush_many` of one."""
        return self.flush_many([namespace], levels=levels, names=names)[0]

    def flush_many(
        self,
        namespaces: Sequence[NamespaceDigest],
        *,
        levels: Collection[int] | None = None,
        names: Names | None = None,
    ) -> list[Flushed]:
        """A new generation in every tier (or the given ones). Who cannot be told now remembers it, and is first told.

        The tiers that last are told last: what they forget cannot then come back into a nearer one.
        """
        generations: list[list[Generation | None]] = []
        untold: list[list[str]] = [[] for _ in namespaces]
        for level, tier in enumerate(self.tiers):
            if levels is not None and level not in levels:
                generations.append(tier.generations(namespaces, names))
                continue
            told: list[Generation | None] = []
            for outcome, names_untold in zip(tier.flush_many(namespaces, names), untold, strict=True):
                if isinstance(outcome, TierError):
                    _log.warning("the %s tier will be told of a flush later: %s", tier.name, outcome)
                    names_untold.append(tier.name)
                told.append(None if isinstance(outcome, TierError) else outcome)
            generations.append(told)
        return [Flushed(tuple(told[index] for told in generations), untold[index]) for index in range(len(namespaces))]

    def take_flushed(self) -> list[NamespaceDigest]:
        """Namespaces that somebody else flushed in one tier; by then they are flushed in the other tiers too."""
        found: dict[NamespaceDigest, None] = {}
        for level, tier in enumerate(self.tiers):
            for namespace in tier.take_flushed():
                found[namespace] = None
                for other, nearer in enumerate(self.tiers):
                    if other != level:
                        _flush_quietly(nearer, namespace)
        return list(found)

    def measure(self) -> None:
        """Asks every tier what it holds; the answers show in `statuses`."""
        for tier in self.tiers:
            try:
                tier.usage()
            except TierError as error:
                _log.debug("the %s tier does not say what it holds: %s", tier.name, error)

    def close(self) -> None:
        """Closes every tier, nearest first. Idempotent."""
        for tier in self.tiers:
            tier.close()


def _flush_quietly(tier: Tier, namespace: NamespaceDigest) -> None:
    try:
        tier.flush(namespace)
    except TierError as error:
        _log.warning("the %s tier will be told of a flush later: %s", tier.name, error)
