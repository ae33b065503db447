"""What `get_or_compute` found and computed, and where the daemon finds the blocks of its namespace."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from kvd.status import Snapshot
from kvd_client.core import verbs
from kvd_client.core.verb import Verb
from kvd_client.session.link import Link


@dataclass(frozen=True, slots=True)
class Found:
    """How much was looked for in one place, and how much of it was there."""

    num_asked: int = 0
    num_found: int = 0

    @property
    def rate(self) -> float:
        """Found of each asked; 0.0 before anything was."""
        return self.num_found / self.num_asked if self.num_asked else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """`tokens` and what follows it is of this cache object's `get_or_compute`; `memory`, `below` and `tiers` are the
    daemon's, in blocks, from its start.
    """

    num_calls: int = 0
    num_hits: int = 0
    """Calls for which all that can be attached was there: whole blocks, and never the last token."""
    num_partial_hits: int = 0
    num_misses: int = 0
    num_failed: int = 0
    """Of the calls above, those whose `compute` raised or left tokens out."""
    tokens: Found = field(default_factory=Found)
    """Tokens asked for, and those that were attached rather than computed."""
    computed_s: float = 0.0
    """Time spent in `compute`."""
    memory: Found = field(default_factory=Found)
    """Of this namespace, everybody's: blocks looked for, and resident in the end (with those that came up for it)."""
    below: Found = field(default_factory=Found)
    """Of this namespace: missing blocks that the tiers below were asked for, and those that one of them had."""
    tiers: dict[str, Found] = field(default_factory=dict)
    """By tier, nearest first, all namespaces together: blocks looked for there, since no nearer one had them."""


class Ledger:
    """Counts the calls of one cache. Safe to use from several threads."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._counts = CacheStatistics()

    def began(self, num_cached: int, num_missing: int) -> None:
        """A call found `num_cached` of its tokens."""
        attachable = max(0, num_cached + num_missing - 1) // self._block_tokens * self._block_tokens
        with self._lock:
            was = self._counts
            self._counts = replace(
                was,
                num_calls=was.num_calls + 1,
                num_hits=was.num_hits + (0 < attachable == num_cached),
                num_partial_hits=was.num_partial_hits + (0 < num_cached < attachable),
                num_misses=was.num_misses + (num_cached == 0),
                tokens=Found(was.tokens.num_asked + num_cached + num_missing, was.tokens.num_found + num_cached),
            )

    def ended(self, seconds: float, *, well: bool) -> None:
        """Its computation took so long."""
        with self._lock:
            was = self._counts
            self._counts = replace(was, num_failed=was.num_failed + (not well), computed_s=was.computed_s + seconds)

    def with_daemons(self, link: Link, digest: bytes) -> Verb[CacheStatistics]:
        """The counts, with what the daemon knows; one request."""
        snapshot = yield from verbs.status(link)
        with self._lock:
            counts = self._counts
        return replace(
            counts,
            memory=_of_namespace(snapshot, digest, "lookups", "hits"),
            below=_of_namespace(snapshot, digest, "asked_below", "found_below"),
            tiers={tier.name: Found(tier.num_asked, tier.num_found) for tier in snapshot.tiers},
        )


def _of_namespace(snapshot: Snapshot, digest: bytes, asked: str, found: str) -> Found:
    own = [each.counters for each in snapshot.namespaces if each.digest == digest.hex()]
    return Found(sum(counters.get(asked, 0) for counters in own), sum(counters.get(found, 0) for counters in own))
