"""Which caches have pools of their own, and what is different for them. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.config.pool_rule import AfterPromote, SpillPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """What may differ from pool to pool."""

    spill: SpillPolicy = "on_evict"
    """on_evict copies the coldest blocks down before they must go; write_through every block as soon as it is sealed;
    on_second_hit what two begins have found resident."""
    after_promote: AfterPromote = "retain"
    """Whether the lower copy stays when a block came up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Caches that fit every condition which is not empty get a pool of this name with this policy."""

    name: str
    models: tuple[str, ...] = ()
    """Patterns for `fnmatch.fnmatchcase`."""
    engines: tuple[str, ...] = ()
    uids: frozenset[int] = frozenset()
    device: str = ""
    """Where its pools are: "host" or a card's UUID; "" for the main device."""
    policy: PoolPolicy = field(default_factory=PoolPolicy)


class PoolRules:
    """The rules in their order, and the policy of pools that none is about. Never changes; a reload makes another."""

    def __init__(self, rules: Iterable[Rule] = (), default: PoolPolicy | None = None) -> None:
        """No two rules have the same name, and none has the name ""."""
        self.rules = tuple(rules)
        self.default = default or PoolPolicy()
        self._policies = {rule.name: rule.policy for rule in self.rules}
        self._devices = {rule.name: rule.device for rule in self.rules}
        self._conditions = [(rule.name, _any_of(rule.models), _any_of(rule.engines), rule.uids) for rule in self.rules]

    def name_for(self, *, model: str, engine: str, uid: int) -> str:
        """Of the first rule that fits; "" when none does. `uid` is the kernel's word, the others are the client's."""
        for name, models, engines, uids in self._conditions:
            if (
                (models is None or models.match(model))
                and (engines is None or engines.match(engine))
                and (not uids or uid in uids)
            ):
                return name
        return ""

    def device(self, name: str) -> str:
        """Where pools of that name are; "" for the main device."""
        return self._devices.get(name, "")

    def policy(self, name: str) -> PoolPolicy:
        """Of pools of that name; the default's once its rule is gone."""
        return self._policies.get(name, self.default)


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(fnmatch.translate, patterns))) if patterns else None
