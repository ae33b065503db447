"""The rules about pools, as the configuration wants them."""

from __future__ import annotations

import types
from collections.abc import Mapping

from kvd.config.pool_rule import PoolRule, uid_of
from kvd.config.schema import Config, Tiers
from kvd.errors import ConfigError
from kvd.service.pool_rules import PoolPolicy, PoolRules, Rule


def pool_rules(config: Config, devices: Mapping[str, str] = types.MappingProxyType({})) -> PoolRules:
    """What a rule leaves out is as in `[tiers]`. `devices` are those in use, by the words that rules have for them.

    Raises `ConfigError` for a user who does not exist (any more), and for a device that was not there at the start.
    """
    default = PoolPolicy(spill=config.tiers.spill, after_promote=config.tiers.after_promote)
    return PoolRules([_rule(rule, config.tiers, devices) for rule in config.pools], default)


def _rule(rule: PoolRule, tiers: Tiers, devices: Mapping[str, str]) -> Rule:
    if rule.device is not None and rule.device not in devices:
        raise ConfigError(
            f"the pool rule {rule.name!r} names the device {rule.device!r}, which takes effect at the next start only"
        )
    uids = {user: uid_of(user) for user in rule.users}
    if unknown := [user for user, uid in uids.items() if uid is None]:
        raise ConfigError(f"users of the pool rule {rule.name!r} names {unknown[0]!r}, and there is no such user")
    return Rule(
        name=rule.name,
        models=rule.models,
        engines=rule.engines,
        uids=frozenset(uid for uid in uids.values() if uid is not None),
        device="" if rule.device is None else devices[rule.device],
        policy=PoolPolicy(spill=rule.spill or tiers.spill, after_promote=rule.after_promote or tiers.after_promote),
    )
