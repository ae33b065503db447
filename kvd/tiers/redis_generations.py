"""Which generation each namespace has in Redis, as far as this daemon knows. Bookkeeping only: no I/O.

The record in Redis is `created:<16 hex>` or `flushed:<16 hex>`, then a space and the namespace's name as JSON (see
`names`) once a daemon that puts blocks has said it. One value holds both, so that they are lost together: what cannot
be listed any more cannot be found any more either. The number is random, not a counter: a counter that was
evicted, expired or lost in a restart would begin again at a number whose blocks may still lie there, and bring flushed
ones back. A lost random number only makes blocks unreachable. The word tells a daemon that finds a new number whether
somebody flushed (its own copies are stale) or Redis merely forgot.
"""

from __future__ import annotations

import re
import secrets
import threading
from typing import NamedTuple

from kvd.block import NamespaceDigest
from kvd.errors import StaleGeneration
from kvd.tiers.base import Generation
from kvd.tiers.names import NamespaceName, decode_name, encode_name

_RECORD = re.compile(rb"(created|flushed):([0-9a-f]{16})(?: (.*))?", re.DOTALL)


def new_generation() -> Generation:
    """A number nobody used before."""
    return Generation(secrets.randbits(64))


def record_of(generation: Generation, *, flushed: bool, name: NamespaceName | None = None) -> bytes:
    """As it is stored in Redis."""
    record = b"%s:%016x" % (b"flushed" if flushed else b"created", generation)
    return record if name is None else with_name(record, name) or record


def with_name(record: object, name: NamespaceName) -> bytes | None:
    """The record with a name; None for one that has a name already, and for what is no record."""
    match = _RECORD.fullmatch(record) if isinstance(record, bytes) else None
    if match is None or (match[3] is not None and decode_name(match[3]) is not None):
        return None
    return b"%s:%s %s" % (match[1], match[2], encode_name(name))


def generation_in(record: object) -> Generation | None:
    """What a record says; None for what is no record."""
    match = _RECORD.fullmatch(record) if isinstance(record, bytes) else None
    return None if match is None else Generation(int(match[2], 16))


def name_in(record: object) -> NamespaceName | None:
    """The name in a record, None for one without, and for what is no record."""
    match = _RECORD.fullmatch(record) if isinstance(record, bytes) else None
    return None if match is None or match[3] is None else decode_name(match[3])


class _Known(NamedTuple):
    generation: Generation
    flushed: bool
    """Whether it began with a flush."""
    named: bool
    """Whether the record has the namespace's name."""


class Generations:
    """What the last contact with Redis said about each namespace. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[NamespaceDigest, _Known] = {}
        self._pending: dict[NamespaceDigest, tuple[Generation, NamespaceName | None]] = {}
        self._flushed_elsewhere: set[NamespaceDigest] = set()

    def known(self, namespace: NamespaceDigest) -> Generation | None:
        """The generation to look under; None when unknown, or while a flush of ours waits to be told to Redis."""
        with self._lock:
            if namespace in self._pending or namespace not in self._known:
                return None
            return self._known[namespace].generation

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
            named = match[3] is not None and decode_name(match[3]) is not None
            self._known[namespace] = _Known(generation, flushed, named)
            pending = self._pending[namespace][0] if namespace in self._pending else None
            if flushed and before is not None and generation not in {before.generation, pending}:
                self._flushed_elsewhere.add(namespace)
            return generation if pending is None or pending == generation else None

    def was_flushed(self, namespace: NamespaceDigest) -> bool:
        """Whether the known generation began with a flush."""
        with self._lock:
            return namespace in self._known and self._known[namespace].flushed

    def is_named(self, namespace: NamespaceDigest) -> bool:
        """Whether Redis has the name beside the known generation."""
        with self._lock:
            return namespace in self._known and self._known[namespace].named

    def stale(self, namespace: NamespaceDigest, generation: Generation) -> StaleGeneration | None:
        """The error for a put under `generation`, or None when it is the known one."""
        with self._lock:
            current = self._known.get(namespace)
            is_another = current is not None and current.generation != generation
            if namespace in self._pending or (current is not None and is_another and current.flushed):
                return StaleGeneration("the namespace was flushed", cause="flushed")
            if current is None or is_another:
                return StaleGeneration("Redis forgot the namespace's generation", cause="generation-lost")
            return None

    def begin_flush(self, namespace: NamespaceDigest, name: NamespaceName | None) -> Generation:
        """From now on nothing of the namespace is read or written until `end_flush`."""
        with self._lock:
            generation, known_name = self._pending.get(namespace) or (new_generation(), None)
            self._pending[namespace] = (generation, name or known_name)
            return generation

    def end_flush(self, namespace: NamespaceDigest, generation: Generation, *, named: bool) -> None:
        """Redis has the new generation."""
        with self._lock:
            if namespace in self._pending and self._pending[namespace][0] == generation:
                del self._pending[namespace]
            self._known[namespace] = _Known(generation, flushed=True, named=named)

    def is_pending(self, namespace: NamespaceDigest) -> bool:
        """Whether a flush of ours waits to be told to Redis."""
        with self._lock:
            return namespace in self._pending

    def pending(self) -> dict[NamespaceDigest, tuple[Generation, NamespaceName | None]]:
        """Flushes that Redis was not told yet, with the names of those that have one."""
        with self._lock:
            return dict(self._pending)

    def take_flushed(self) -> list[NamespaceDigest]:
        """Namespaces seen flushed by somebody else since the last call."""
        with self._lock:
            found, self._flushed_elsewhere = self._flushed_elsewhere, set()
            return list(found)
