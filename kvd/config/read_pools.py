"""Reads the `[[pools]]` tables of a configuration file. Every mistake is one line that names the rule and the key."""

from __future__ import annotations

import msgspec

from kvd.config.keys import POOL_KEYS, POOLS, nearest
from kvd.config.pool_rule import MAX_RULES, PoolRule, is_pattern, uid_of
from kvd.config.sizes import parse_size
from kvd.errors import ConfigError


def read_pools(value: object, origin: str) -> tuple[PoolRule, ...]:
    """`value` is what TOML has for `pools`. Raises `ConfigError`."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"{POOLS} must be tables, each headed [[{POOLS}]] ({origin})")
    if len(value) > MAX_RULES:
        raise ConfigError(f"there are {len(value)} tables [[{POOLS}]], at most {MAX_RULES} may be ({origin})")
    rules = [_rule(table, number, origin) for number, table in enumerate(value, start=1)]
    for number, rule in enumerate(rules, start=1):
        first = next(index for index, other in enumerate(rules, start=1) if other.name == rule.name)
        if first != number:
            raise ConfigError(
                f"name of [[{POOLS}]] number {number} must be another than number {first} has, {rule.name!r} ({origin})"
            )
    return tuple(rules)


def _rule(table: dict[str, object], number: int, origin: str) -> PoolRule:
    place = f"[[{POOLS}]] number {number}"
    if isinstance(table.get("name"), str):
        place += f", {table['name']!r},"
    values = {}
    for field, value in table.items():
        if field not in POOL_KEYS:
            alike = nearest(field, POOL_KEYS)
            advice = f"did you mean {alike}?" if alike else f"there are {', '.join(POOL_KEYS)}"
            raise ConfigError(f"unknown key {field} in {place} ({origin}); {advice}")
        key = POOL_KEYS[field]
        try:
            checked = msgspec.convert(parse_size(value) if key.is_size and isinstance(value, str) else value, key.hint)
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError(f"{field} of {place} must be {key.kind}; not {_shown(value)} ({origin})") from error
        if field in {"models", "engines"} and (open_ones := [one for one in checked if not is_pattern(one)]):
            raise ConfigError(f"{field} of {place} must be {key.kind}; not {_shown(open_ones[0])} ({origin})")
        if field == "users" and (unknown := [one for one in checked if uid_of(one) is None]):
            raise ConfigError(f"users of {place} names {_shown(unknown[0])}, and there is no such user ({origin})")
        values[field] = checked
    if "name" not in values:
        raise ConfigError(f"{place} has no name, which it must have ({origin})")
    return PoolRule(**values)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
