"""A loaded configuration as text. Pure."""

from __future__ import annotations

import json

import msgspec

from kvd.config.keys import KEYS, POOLS, Key
from kvd.config.load import Loaded, as_flat
from kvd.config.pool_rule import PoolRule


def _toml_value(key: Key, value: object) -> str:
    if isinstance(value, bool) or (isinstance(value, int | float) and not key.is_size) or value == 0:
        return key.format(value)
    return _toml_text(key.format(value))


def _toml_text(value: object) -> str:
    """A text, a number or a list of them."""
    # A JSON string is a TOML basic string once DEL is escaped too, which JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _pool_table(rule: PoolRule) -> list[str]:
    values = msgspec.to_builtins(rule)
    return ["", f"[[{POOLS}]]", *(f"{name} = {_toml_text(value)}" for name, value in values.items())]


def as_toml(loaded: Loaded) -> str:
    """Every key with its value, its origin as a comment; a file of this text gives the same configuration.

    Except for passwords, which become stars.
    """
    flat = as_flat(loaded.config)
    pairs = {name: f"{key.field} = {_toml_value(key, flat[name])}" for name, key in KEYS.items()}
    width = max(len(pair) for pair in pairs.values() if len(pair) <= 40)
    lines: list[str] = []
    section = ""
    for name, key in KEYS.items():
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"]
        is_cut = key.is_secret and key.format(flat[name]) != flat[name]
        lines.append(f"{pairs[name]:<{width}}  # {loaded.origin[name]}" + (", password not shown" if is_cut else ""))
    for rule in loaded.config.pools:
        lines += _pool_table(rule)
    return "\n".join(lines) + "\n"
