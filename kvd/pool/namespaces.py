"""The counters of one namespace, and the few words that `kvd status` shows beside them."""

from __future__ import annotations

from kvd.block import NamespaceDigest
from kvd.layout import KVLayout


class NamespaceCounters:
    """One namespace within one pool. Everything counts blocks, upwards from the daemon's start.

    Made by `Pool.namespace`; the verbs that find or publish blocks take it, so that no lookup is needed there.
    """

    __slots__ = (
        "adapter",
        "asked_below",
        "block_tokens",
        "computed_s",
        "computed_tokens",
        "digest",
        "dropped_unspilled",
        "duplicate_seals",
        "engine",
        "evictions",
        "fills",
        "flushed",
        "found_below",
        "has_salt",
        "hits",
        "layout",
        "lookups",
        "misses",
        "model",
        "num_sealed",
        "positional",
        "seals",
        "spills",
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

    def __init__(
        self,
        digest: NamespaceDigest,
        *,
        model: str = "",
        engine: str = "",
        adapter: str = "",
        has_salt: bool = False,
        block_tokens: int = 0,
        positional: str = "",
        layout: KVLayout | None = None,
    ) -> None:
        self.digest = digest
        self.model = model
        self.engine = engine
        self.adapter = adapter
        self.has_salt = has_salt
        self.block_tokens = block_tokens
        self.positional = positional
        self.layout = layout
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
