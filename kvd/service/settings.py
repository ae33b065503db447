"""The figures that policy depends on, and what the server tells about itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.block import SessionId
from kvd.service.identity import Identity, Isolation, tenant_of
from kvd.service.pool_rules import PoolRules


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """How blocks move between the pools and the tiers below. Watermarks are fractions of a pool's capacity."""

    low_watermark: float = 0.10
    """Spilling starts when less than this can be allocated without losing a block."""
    high_watermark: float = 0.20
    """And stops when this much can."""
    drain_s: float = 10.0
    """How long a clean stop may copy down what has no copy yet."""
    answer_s: float = 0.08
    """How long a begin waits for a tier that shows no progress, unless the caller names a bound of its own."""
    first_answer_s: float = 1.0
    """How long it waits at most, all in all, while the tiers were not asked yet: the machine is too busy to, or this is
    their first answer since the start."""
    retry_s: float = 0.5
    """How long spilling rests after a tier did not take a block."""
    poll_s: float = 5.0
    """How often the tiers are asked whether somebody else flushed a namespace."""
    measure_s: float = 30.0
    """How often they are asked what they hold, which makes a Redis look at every key."""
    max_spilling_nbytes: int = 64 << 20
    """Bytes on their way down at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Set once, from the configuration. Durations in seconds."""

    isolation: Isolation = "group"
    shared_gid: int | None = None
    """The group that stands for all who may connect, with isolation by group; None goes by each one's primary group."""
    default_wait_s: float = 10.0
    """How long a begin waits for another session's computation when the client names no bound; at most `max_wait_s`."""
    max_wait_s: float = 300.0
    """Longer waits that a client asks for are cut to this."""
    growth_wait_s: float = 10.0
    """How long a request waits for memory that is being made before the pool has to evict instead."""
    drain_wait_s: float = 1.0
    """How long a request waits for a card's memory that clients were told to close, before it gets its error."""
    idle_release_s: float = 0.0
    """How long a card stays that nobody uses; 0 for good."""
    restore_wait_s: float = 20.0
    """How long opening a cache waits for a card that was released."""
    memory_retry_s: float = 5.0
    """How long after memory could not be had it is tried again."""
    max_caches_per_session: int = 256
    admin_uids: frozenset[int] = field(default_factory=lambda: frozenset({0, os.geteuid()}))
    """Users who may flush and spill what is not their own, and have the pools checked."""
    pinned_share: float = 0.5
    """How much of the memory budget pins may take."""
    uid_quota_nbytes: int | None = None
    """How much the pins of one user may take; None for as much as that."""
    checksums: bool = True
    """Whether checksums given at a seal are kept and handed back."""
    tiers: TierSettings = field(default_factory=TierSettings)
    """Matters only where there is a tier below."""
    pool_rules: PoolRules = field(default_factory=PoolRules)
    """At the start; `Service.set_pool_rules` gives others."""
    warnings: tuple[str, ...] = ()
    """What the start had to settle for (a budget cut to the memory there is, …); shown by every status."""

    def is_admin(self, identity: Identity) -> bool:
        """Whether this is root or the daemon's own user."""
        return identity.uid in self.admin_uids

    def tenant(self, identity: Identity) -> str:
        """The wall a session lives behind."""
        return tenant_of(identity, self.isolation, self.shared_gid)

    def is_walled(self, identity: Identity) -> bool:
        """Whether this one may see its own tenant only: not a name, not a count of another's."""
        return self.isolation == "uid" and not self.is_admin(identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """What only the server knows of itself, for status."""

    counters: Mapping[str, int] = field(default_factory=dict)
    stalled: frozenset[SessionId] = frozenset()
