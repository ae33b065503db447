"""The names under which kvd's things lie in Redis.

    <prefix>v:<namespace, 32 hex>:<generation, 16 hex>:<chain hash, 64 hex>     one block
    <prefix>g:<namespace, 32 hex>                                              the namespace's generation and name

The namespace is the first half of its digest; the value's header holds the chain hash whole.
"""

from __future__ import annotations

import re

from kvd.block import NamespaceDigest
from kvd.errors import ConfigError
from kvd.tiers.base import Generation, TierKey

_NAMESPACE_NBYTES = 16
_PREFIX = re.compile(r"[A-Za-z0-9:_.\-]{0,64}")


class RedisKeys:
    """Builds names under one prefix. Raises `ConfigError` for a prefix that is not plain text."""

    def __init__(self, prefix: str) -> None:
        # No glob characters (the prefix goes into SCAN patterns) and no braces (they would pin all to one slot).
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"the Redis key prefix {prefix!r} may hold letters, digits and : _ . - only, at most 64")
        self._prefix = prefix.encode()

    def block(self, key: TierKey, generation: Generation) -> bytes:
        """The name of a block's value."""
        return b"%s%016x:%s" % (self._blocks_of(key.namespace), generation, key.chain_hash.hex().encode())

    def generation(self, namespace: NamespaceDigest) -> bytes:
        """The name of a namespace's generation record."""
        return b"%sg:%s" % (self._prefix, namespace[:_NAMESPACE_NBYTES].hex().encode())

    def pattern(self, namespace: NamespaceDigest | None = None) -> bytes:
        """The SCAN pattern of all blocks, or of one namespace's in every generation."""
        return (b"%sv:" % self._prefix if namespace is None else self._blocks_of(namespace)) + b"*"

    @property
    def records_pattern(self) -> bytes:
        """The SCAN pattern of all generation records."""
        return b"%sg:*" % self._prefix

    def space_of(self, redis_key: bytes) -> bytes:
        """The part of a block's or a record's name that stands for its namespace; see `space`."""
        start = len(self._prefix) + 2
        return redis_key[start : start + 2 * _NAMESPACE_NBYTES]

    def space(self, namespace: NamespaceDigest) -> bytes:
        """As it stands in a name."""
        return namespace[:_NAMESPACE_NBYTES].hex().encode()

    def is_of(self, redis_key: bytes, namespace: NamespaceDigest, generation: Generation) -> bool:
        """Whether a block's name is of this generation."""
        return redis_key.startswith(b"%s%016x:" % (self._blocks_of(namespace), generation))

    def _blocks_of(self, namespace: NamespaceDigest) -> bytes:
        return b"%sv:%s:" % (self._prefix, namespace[:_NAMESPACE_NBYTES].hex().encode())
