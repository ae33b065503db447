"""How the Redis tier uses its Redis: names, times, codec."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.errors import ConfigError
from kvd.tiers.codecs import codec_named
from kvd.tiers.redis_keys import RedisKeys

MAX_TTL_S = 366 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """How the tier uses its Redis. Raises `ConfigError` for values that make no sense."""

    prefix: str = "kvd:"
    """Goes before every key; daemons that share blocks share it."""
    ttl_s: int = 3600
    """How long a block lives after its last use."""
    codec: str = "raw"
    """raw, lz4 or zstd: how blocks are written. Every codec is read."""
    control_timeout_s: float = 0.05
    """Bounds each wait for a small answer."""
    connect_timeout_s: float = 0.25
    """Bounds connecting, log-in included; over a network it takes several round trips."""
    bulk_timeout_s: float = 0.25
    """Bounds each wait for a value, together with the time its size takes at `bulk_nbytes_per_s`."""
    bulk_nbytes_per_s: float = 20e6
    """The slowest transfer that is still worth waiting for."""

    def __post_init__(self) -> None:
        if isinstance(self.ttl_s, bool) or not 1 <= self.ttl_s <= MAX_TTL_S:
            raise ConfigError(f"redis ttl_s must be from 1 to {MAX_TTL_S} seconds, not {self.ttl_s}")
        for name in ("control_timeout_s", "connect_timeout_s", "bulk_timeout_s"):
            if not 0 < getattr(self, name) <= 60:
                raise ConfigError(f"redis {name} must be above 0 and at most 60 seconds")
        if not self.bulk_nbytes_per_s > 0:
            raise ConfigError("redis bulk_nbytes_per_s must be above 0")
        codec_named(self.codec)
        RedisKeys(self.prefix)
