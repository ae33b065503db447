"""The namespaces of one pool: the counters of each, and the few words that `kvd status` shows beside them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from kvd.block import NamespaceDigest
from kvd.layout import KVLayout


@dataclass(frozen=True, slots=True)
class NamespaceWords:
    """What its opener said of it, to be shown; the digest alone decides."""

    model: str = ""
    engine: str = ""
    adapter: str = ""
    has_salt: bool = False
    block_tokens: int = 0
    """0 where a block's bytes are no tokens."""
    positional: str = ""
    layout: KVLayout | None = None


class NamespaceCounters:
    """One namespace within one pool. Everything counts blocks, upwards from the daemon's start.

    Made by `Pool.namespace`; the verbs that find or publish blocks take it, so that no lookup is needed there.
    """

    __slots__ = (
        "asked_below",
        "computed_s",
        "computed_tokens",
        "digest",
        "dropped_unspilled",
        "duplicate_seals",
        "evictions",
        "fills",
        "flushed",
        "found_below",
        "hits",
        "lookups",
        "misses",
        "num_sealed",
        "seals",
        "spills",
        "words",
    )

    COUNTERS = (
        "lookups",
        "hits",
        "misses",
        "seals",
        "duplicate_seals",
        "evictions",
        "dropped_unspilled",
        "fills",
        "spills",
        "flushed",
        "asked_below",
        "found_below",
    )

    def __init__(self, digest: NamespaceDigest, words: NamespaceWords) -> None:
        self.digest = digest
        self.words = words
        self.computed_tokens = 0
        """Tokens whose computation clients reported, see `kvd.service.savings`."""
        self.computed_s = 0.0
        self.num_sealed = 0
        """Blocks that a lookup can find now; not a counter, it goes down too."""
        self.lookups = 0
        """Blocks that begins asked for; always hits + misses."""
        self.hits = 0
        self.misses = 0
        self.seals = 0
        self.duplicate_seals = 0
        """Seals that met a block of the same hash."""
        self.evictions = 0
        self.dropped_unspilled = 0
        """Those of the evictions that had no copy below."""
        self.fills = 0
        """Promotions that ended well."""
        self.spills = 0
        """Copies to a tier below that ended well."""
        self.flushed = 0
        self.asked_below = 0
        """Blocks missing here that the tiers below were asked for."""
        self.found_below = 0
        """Those of them that continued the resident prefix there."""

    def as_dict(self) -> dict[str, int]:
        """Counter name -> value."""
        return {name: getattr(self, name) for name in self.COUNTERS}


class Namespaces(dict[NamespaceDigest, NamespaceCounters]):
    """Those of one pool, by digest."""

    def __init__(self) -> None:
        super().__init__()
        self._counts_of_forgotten = dict.fromkeys(NamespaceCounters.COUNTERS, 0)

    def obtain(self, digest: NamespaceDigest, words: NamespaceWords) -> NamespaceCounters:
        """The counters of one, made at its first use; the words are kept from then on."""
        found = self.get(digest)
        if found is None:
            found = self[digest] = NamespaceCounters(digest, words)
        return found

    def forget(self, in_use: Container[NamespaceDigest]) -> list[NamespaceDigest]:
        """Drops those that have no block and are not `in_use`; what they counted stays in the totals."""
        idle = [digest for digest, one in self.items() if not one.num_sealed and digest not in in_use]
        for digest in idle:
            for name, value in self.pop(digest).as_dict().items():
                self._counts_of_forgotten[name] += value
        return idle

    def totals(self) -> dict[str, int]:
        """The counters of all there ever were, summed."""
        totals = self._counts_of_forgotten.copy()
        for namespace in self.values():
            for name, value in namespace.as_dict().items():
                totals[name] += value
        return totals
