"""Which generation each namespace has in Redis, as far as this daemon knows. Bookkeeping only: no I/O.

The record in Redis is `created:<16 hex>` or `flushed:<16 hex>`. The number is random, not a counter: a counter that was
evicted, expired or lost in a restart would begin again at a number whose blocks may still lie there, and bring flushed
ones back. A lost random number only makes blocks unreachable. The word tells a daemon that finds a new number whether
somebody flushed (its own copies are stale) or Redis merely forgot.
"""

from __future__ import annotations

import re
import secrets
import threading

from kvd.block import NamespaceDigest
from kvd.errors import StaleGeneration
from kvd.tiers.base import Generation

_RECORD = re.compile(rb"(created|flushed):([0-9a-f]{16})")


def new_generation() -> Generation:
    """A number nobody used before."""
    return Generation(secrets.randbits(64))


def record_of(generation: Generation, *, flushed: bool) -> bytes:
    """As it is stored in Redis."""
    return b"%s:%016x" % (b"flushed" if flushed else b"created", generation)


class Generations:
    """What the last contact with Redis said about each namespace. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[NamespaceDigest, tuple[Generation, bool]] = {}
        self._pending: dict[NamespaceDigest, Generation] = {}
        self._flushed_elsewhere: set[NamespaceDigest] = set()

    def known(self, namespace: NamespaceDigest) -> Generation | None:
        """The generation to look under; None when unknown, or while a flush of ours waits to be told to Redis."""
        with self._lock:
            if namespace in self._pending or namespace not in self._known:
                return None
            return self._known[namespace][0]

    def observe(self, namespace: NamespaceDigest, record: object) -> Generation | None:
        """Take over what Redis says: the record's bytes, or None. The generation to look under that it names.

        None for no valid record, and while a flush of ours waits to be told to Redis: what it says then is over.
        """
        match = _RECORD.fullmatch(record) if isinstance(record, bytes) else None
        with self._lock:
            before = self._known.get(namespace)
            if match is None:
                self._known.pop(namespace, None)
                return None
            generation, flushed = Generation(int(match[2], 16)), match[1] == b"flushed"
            self._known[namespace] = (generation, flushed)
            if (
                flushed
                and before is not None
                and before[0] != generation
                and self._pending.get(namespace) != generation
            ):
                self._flushed_elsewhere.add(namespace)
            return generation if self._pending.get(namespace, generation) == generation else None

    def was_flushed(self, namespace: NamespaceDigest) -> bool:
        """Whether the known generation began with a flush."""
        with self._lock:
            return namespace in self._known and self._known[namespace][1]

    def stale(self, namespace: NamespaceDigest, generation: Generation) -> StaleGeneration | None:
        """The error for a put under `generation`, or None when it is the known one."""
        with self._lock:
            current = self._known.get(namespace)
            if namespace in self._pending or (current is not None and current[0] != generation and current[1]):
                return StaleGeneration("the namespace was flushed", cause="flushed")
            if current is None or current[0] != generation:
                return StaleGeneration("Redis forgot the namespace's generation", cause="generation-lost")
            return None

    def begin_flush(self, namespace: NamespaceDigest) -> Generation:
        """From now on nothing of the namespace is read or written until `end_flush`."""
        with self._lock:
            return self._pending.setdefault(namespace, new_generation())

    def end_flush(self, namespace: NamespaceDigest, generation: Generation) -> None:
        """Redis has the new generation."""
        with self._lock:
            if self._pending.get(namespace) == generation:
                del self._pending[namespace]
            self._known[namespace] = (generation, True)

    def is_pending(self, namespace: NamespaceDigest) -> bool:
        """Whether a flush of ours waits to be told to Redis."""
        with self._lock:
            return namespace in self._pending

    def pending(self) -> dict[NamespaceDigest, Generation]:
        """Flushes that Redis was not told yet."""
        with self._lock:
            return dict(self._pending)

    def take_flushed(self) -> list[NamespaceDigest]:
        """Namespaces seen flushed by somebody else since the last call."""
        with self._lock:
            found, self._flushed_elsewhere = self._flushed_elsewhere, set()
            return list(found)
