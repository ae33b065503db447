"""The tiers below the pools, as the configuration wants them. Trouble with one is a warning: memory serves on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from kvd.block import PAGE_NBYTES
from kvd.build.sizes import Sizes
from kvd.config import schema
from kvd.errors import ConfigError, OutOfMemory, RuntimeFolderError, TierUnavailable
from kvd.memory import HostSegment, available_memory_nbytes, reserve_nbytes
from kvd.tiers.base import Tier
from kvd.tiers.embedded_config import MIN_BUDGET_NBYTES
from kvd.tiers.host import HostTier
from kvd.tiers.stack import Stack

if TYPE_CHECKING:
    from kvd.tiers.redis_tier import RedisOptions

OFF = frozenset({"", "off"})
EMBEDDED = "embedded"
MAX_AUTO_REDIS_BUDGET_NBYTES = 8 << 30
AUTO_BUDGET_DIVISOR = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """`stack` is None when there is no tier below the pools. `warnings` are one sentence each."""

    stack: Stack | None
    warnings: tuple[str, ...]


def build_tiers(
    tiers: schema.Tiers, sizes: Sizes, *, runtime_dir: Path, available_nbytes: int, environ: Mapping[str, str]
) -> LowerTiers:
    """Makes the tiers; waits for none of them (an embedded server starts on a thread of its own).

    `available_nbytes` is what the machine could give before the pools took anything. Raises nothing that keeps a
    daemon from serving from memory: that becomes a warning.
    """
    made: list[Tier] = []
    lasting: list[str] = []
    warnings: list[str] = []
    if tiers.host.budget:
        made.append(_host_tier(tiers.host.budget, sizes.segment_nbytes, available_nbytes))
    try:
        if tiers.redis.url == EMBEDDED:
            tier, keeps = _embedded_tier(tiers.redis, sizes, runtime_dir, available_nbytes, warnings)
            made.append(tier)
            if keeps:
                lasting.append(tier.name)
        elif tiers.redis.url not in OFF:
            made.append(_external_tier(tiers.redis, environ))
            lasting.append(made[-1].name)
    except (ConfigError, TierUnavailable) as error:
        warnings.append(f"no Redis tier: {error}")
    for warning in warnings:
        _log.warning("%s", warning)
    return LowerTiers(Stack(made, lasting=lasting) if made else None, tuple(warnings))


def check_tiers(tiers: schema.Tiers, environ: Mapping[str, str]) -> None:
    """Raises the `ConfigError` or `TierUnavailable` that `build_tiers` would make a warning of; starts nothing."""
    if tiers.redis.password_file:
        from kvd.tiers.redis_url import read_password_file

        # Whatever the URL: a flag may name a server, and then the daemon would be without it.
        read_password_file(tiers.redis.password_file)
    if tiers.redis.url in OFF:
        return
    _options(tiers.redis)
    if tiers.redis.url == EMBEDDED:
        from kvd.tiers.embedded import check_persistence_dir
        from kvd.tiers.embedded_config import find_server

        find_server()
        if tiers.redis.persistence:
            check_persistence_dir(Path(tiers.redis.persistence))
    else:
        from kvd.tiers.redis_url import parse_redis_url

        parse_redis_url(_whole_url(tiers.redis), environ)


def auto_redis_budget_nbytes(available_nbytes: int, pools_budget_nbytes: int) -> int:
    """For "auto": a third of what the pools leave available, at most 8 GiB."""
    left_nbytes = max(0, available_nbytes - pools_budget_nbytes)
    return min(left_nbytes // AUTO_BUDGET_DIVISOR, MAX_AUTO_REDIS_BUDGET_NBYTES)


def _host_tier(budget_nbytes: int, segment_nbytes: int, available_nbytes: int) -> HostTier:
    reserve = reserve_nbytes(available_nbytes)

    def before_step(remaining_nbytes: int) -> None:
        if available_memory_nbytes() - reserve < remaining_nbytes:
            raise OutOfMemory(f"the host tier leaves the machine its reserve of {reserve >> 20} MiB")

    return HostTier(
        make_segment=lambda nbytes: HostSegment(nbytes, before_step=before_step),
        budget_nbytes=budget_nbytes,
        # As large as the pools' segments, which hold a block of every size that there may be.
        segment_nbytes=min(segment_nbytes, budget_nbytes // PAGE_NBYTES * PAGE_NBYTES),
    )


def _external_tier(redis: schema.RedisTier, environ: Mapping[str, str]) -> Tier:
    from kvd.tiers.redis_tier import RedisTier
    from kvd.tiers.redis_url import parse_redis_url

    return RedisTier(parse_redis_url(_whole_url(redis), environ), _options(redis))


def _embedded_tier(
    redis: schema.RedisTier, sizes: Sizes, runtime_dir: Path, available_nbytes: int, warnings: list[str]
) -> tuple[Tier, bool]:
    """The tier, and whether its blocks outlive the daemon."""
    from kvd.tiers.embedded import EmbeddedOptions
    from kvd.tiers.embedded_tier import EmbeddedRedisTier

    budget = redis.budget
    if not isinstance(budget, int):
        budget = auto_redis_budget_nbytes(available_nbytes, sizes.budget_nbytes)
        if budget < MIN_BUDGET_NBYTES:
            raise TierUnavailable(
                f"the pools leave only {available_nbytes - sizes.budget_nbytes >> 20} MiB available, too little for "
                "an embedded server; set tiers.redis.budget, lower memory.budget, or set tiers.redis.url to off"
            )
    options = EmbeddedOptions(
        runtime_dir=runtime_dir,
        budget_nbytes=budget,
        persistence_dir=Path(redis.persistence) if redis.persistence else None,
    )
    try:
        return EmbeddedRedisTier(options, _options(redis)), options.persistence_dir is not None
    except RuntimeFolderError as error:
        warnings.append(
            f"the embedded Redis keeps nothing when the daemon stops: {error}; mend that, or name another folder in "
            f"tiers.redis.persistence"
        )
        return EmbeddedRedisTier(replace(options, persistence_dir=None), _options(redis)), False


def _options(redis: schema.RedisTier) -> RedisOptions:
    from kvd.tiers.redis_tier import RedisOptions

    return RedisOptions(prefix=redis.prefix, ttl_s=redis.ttl_s, codec=redis.codec)


def _whole_url(redis: schema.RedisTier) -> str:
    """The URL with what else the section says about the password; the section wins."""
    named = {"password_file": redis.password_file, "password_env": redis.password_env}
    query = urlencode({name: value for name, value in named.items() if value})
    if not query:
        return redis.url
    return f"{redis.url}{'&' if '?' in redis.url else '?'}{query}"
