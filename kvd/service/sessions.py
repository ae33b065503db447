"""What the service knows of one session: who it is, which caches it opened, which segments it was given, what waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.block import NamespaceDigest, SessionId
from kvd.errors import InvalidRequest, UnknownCache
from kvd.pool import NamespaceCounters, Pool
from kvd.service.identity import Identity

if TYPE_CHECKING:
    from kvd.service.parking import Parked


Asked = tuple[NamespaceDigest, str, bool]
"""What tells the caches of a session apart: the namespace, the device it named, and whether it is to be staged."""


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """A session's handle on one namespace and its pool."""

    handle: int
    pool: Pool
    digest: NamespaceDigest
    namespace: NamespaceCounters
    block_tokens: int


@dataclass(slots=True, eq=False)
class Session:
    """One live session. Ended ones are forgotten; their numbers never come back."""

    id: SessionId
    identity: Identity
    tenant: str
    label: str
    client_version: str
    connected_s: float
    caches: dict[int, Cache] = field(default_factory=dict)
    handles: dict[Asked, int] = field(default_factory=dict)
    granted: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Pool id -> segments of which the session has any descriptor, or the handle."""
    granted_writable: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Pool id -> those of them whose descriptor is writable."""
    parked: set[Parked] = field(default_factory=set)
    """Its requests that wait; kept by `kvd.service.parking.ParkingLot`."""
    num_requests: int = 0
    saved: Counter[int] = field(default_factory=Counter)
    """Cache handle -> tokens that were found there."""

    @property
    def tokens_saved(self) -> int:
        """Tokens it did not have to compute."""
        return self.saved.total()

    def cache(self, handle: int) -> Cache:
        """Raises `UnknownCache`."""
        try:
            return self.caches[handle]
        except KeyError:
            raise UnknownCache(f"session {self.id} never opened cache {handle}") from None

    def cache_of(self, asked: Asked) -> Cache | None:
        """The cache it opened by that already."""
        handle = self.handles.get(asked)
        return None if handle is None else self.caches[handle]

    def check_may_open(self, limit: int) -> None:
        """Raises `InvalidRequest` when it has as many caches as it may."""
        if len(self.caches) >= limit:
            raise InvalidRequest(f"a session may open at most {limit} caches; reuse one, or connect anew")

    def add_cache(self, asked: Asked, pool: Pool, namespace: NamespaceCounters, block_tokens: int) -> Cache:
        """A new handle, counted up from 1."""
        handle = self.handles[asked] = len(self.caches) + 1
        cache = self.caches[handle] = Cache(handle, pool, asked[0], namespace, block_tokens)
        return cache
