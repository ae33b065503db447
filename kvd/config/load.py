"""Merges file, environment and flags into one checked `Config`, and remembers where every value came from.

Each value is checked by itself, in the place it came from, so that an error names the key and that place. A value of
the environment or a flag is text; one of a file has TOML's own types, which must match ("4" is not a number).
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from kvd.config.keys import ENVIRONMENT_PREFIX, KEYS, POOLS, SECTIONS, Key, nearest
from kvd.config.paths import runtime_dir
from kvd.config.pool_rule import PoolRule
from kvd.config.read_pools import read_pools
from kvd.config.schema import Config
from kvd.config.sizes import format_size, parse_size
from kvd.errors import ConfigError

RESERVED_ENVIRONMENT = frozenset({"KVD_CONFIG", "KVD_REDIS_PASSWORD", "KVD_LIBCUDA"})
"""Variables with our prefix that are no key of the configuration."""

MIN_HOST_BUDGET_NBYTES = 1 << 20
"""Less holds next to nothing: more likely a forgotten unit."""

_TEXT_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration, the place each key's value came from, and the variables that look like keys but are none."""

    config: Config
    origin: dict[str, str]
    """Dotted name -> "default", "file PATH", "environment VARIABLE" or "flag --FLAG". `[[pools]]` are the file's."""
    ignored_environment: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Merges TOML file < KVD_* environment < flags (dotted name -> value; None is a flag not given).

    `path` None reads no file (`kvd.config.paths.config_file` finds the well-known one). Raises `ConfigError` for an
    unreadable file, an unknown key (the nearest is named), a wrong type, a value out of range, and values that
    contradict each other.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    pools: tuple[PoolRule, ...] = ()
    origin = dict.fromkeys(KEYS, "default")

    if path is not None:
        tables = _read_file(Path(path))
        pools = read_pools(tables.pop(POOLS, []), f"file {path}")
        for key, value in _keys_of(tables, "", Path(path)):
            origin[key.name] = f"file {path}"
            values[key.name] = _checked(key, value, origin[key.name], is_text=False)
    variables, ignored = _read_environment(environ)
    for key, text in variables:
        origin[key.name] = f"environment {key.env}"
        values[key.name] = _checked(key, text, origin[key.name], is_text=True)
    for name, value in (flags or {}).items():
        if value is None:
            continue
        key = _known(name, "flags")
        origin[name] = f"flag {key.flag}"
        values[name] = _checked(key, value, origin[name], is_text=isinstance(value, str))

    named = values.get("runtime_dir")
    values["runtime_dir"] = str(runtime_dir(None if named is None else str(named), environ))
    # Where a service manager gives the daemon a folder that outlives it, blocks are kept there unless somebody says no.
    state = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if state and "tiers.redis.persistence" not in values:
        values["tiers.redis.persistence"] = str(Path(state) / "redis")
        origin["tiers.redis.persistence"] = "environment STATE_DIRECTORY"
    for name in ("tiers.redis.persistence", "tiers.redis.password_file"):
        if path_text := values.get(name):
            values[name] = str(Path.cwd() / Path(str(path_text)).expanduser())
    config = structs.replace(msgspec.convert(_nested(values), Config), pools=pools)
    if config.waits.default_s > config.waits.max_s and origin["waits.default_s"] == "default":
        # Whoever sets only the bound does not contradict himself.
        config = structs.replace(config, waits=structs.replace(config.waits, default_s=config.waits.max_s))
        origin["waits.default_s"] = "default, cut to waits.max_s"
    _check_together(config, origin)
    return Loaded(config=config, origin=origin, ignored_environment=ignored)


def as_flat(config: Config) -> dict[str, object]:
    """Dotted name -> value of every key, in the order of the schema."""
    return {name: attrgetter(name)(config) for name in KEYS}


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _keys_of(table: Mapping[str, object], section: str, path: Path) -> list[tuple[Key, object]]:
    found = []
    for field, value in table.items():
        name = f"{section}.{field}" if section else field
        if name not in SECTIONS:
            found.append((_known(name, str(path), is_table=isinstance(value, dict)), value))
        elif isinstance(value, dict):
            found += _keys_of(value, name, path)
        else:
            raise ConfigError(f"{name} in {path} must be a table: write [{name}] and its keys below")
    return found


def _read_environment(environ: Mapping[str, str]) -> tuple[list[tuple[Key, str]], tuple[str, ...]]:
    by_variable = {key.env: key for key in KEYS.values()}
    found, ignored = [], []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in RESERVED_ENVIRONMENT:
            continue
        if variable in by_variable:
            # An empty variable is one not set: units and containers cannot always leave it out.
            if environ[variable]:
                found.append((by_variable[variable], environ[variable]))
            continue
        # Others own variables with this prefix too (a container orchestrator makes KVD_SERVICE_HOST for a service
        # called kvd), so only what is nearly one of ours is taken for a mistake.
        if alike := nearest(variable, by_variable, cutoff=0.8):
            raise ConfigError(f"unknown environment variable {variable}; did you mean {alike}?")
        ignored.append(variable)
    return found, tuple(ignored)


def _known(name: str, where: str, *, is_table: bool = False) -> Key:
    if name in KEYS:
        return KEYS[name]
    kind = "table" if is_table else "key"
    alike = nearest(name, (*(SECTIONS if is_table else KEYS), POOLS))
    if alike is None and not is_table:
        # A field without its section ("budget") is nearest to the key that ends in it.
        alike = next((known for known in KEYS if known.endswith(f".{name.rpartition('.')[2]}")), None)
    advice = f"did you mean {alike}?" if alike else f"`kvd config show` lists the {len(KEYS)} there are"
    raise ConfigError(f"unknown {kind} {name} in {where}; {advice}")


def _checked(key: Key, value: object, origin: str, *, is_text: bool) -> object:
    """The value in the field's own type. Raises `ConfigError` that names the key, the place and what would be right."""
    try:
        if key.is_size and isinstance(value, str) and value not in key.choices:
            value = parse_size(value)
        elif is_text and key.default in (True, False) and isinstance(value, str):
            value = _TEXT_BOOLS.get(value.strip().lower(), value)
        checked = msgspec.convert(value, key.hint, strict=not is_text)
    except (msgspec.ValidationError, ConfigError) as error:
        raise _wrong(key, value, origin) from error
    if isinstance(checked, float) and not math.isfinite(checked):
        raise _wrong(key, value, origin)
    return checked


def _wrong(key: Key, value: object, origin: str) -> ConfigError:
    shown = "what was given" if key.is_secret else _shown(value)
    return ConfigError(f"{key.name} must be {key.kind}; not {shown} ({origin})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    top: dict[str, Any] = {}
    for name, value in values.items():
        table = top
        *sections, field = name.split(".")
        for section in sections:
            table = table.setdefault(section, {})
        table[field] = value
    return top


def _check_together(config: Config, origin: Mapping[str, str]) -> None:
    memory, limits, waits = config.memory, config.limits, config.waits

    def contradiction(lesser: str, greater: str) -> ConfigError:
        flat = as_flat(config)
        first, second = (f"{name} ({KEYS[name].format(flat[name])}, {origin[name]})" for name in (lesser, greater))
        return ConfigError(f"{first} must not be greater than {second}")

    if isinstance(memory.budget, int) and isinstance(memory.segment, int) and memory.segment > memory.budget:
        raise contradiction("memory.segment", "memory.budget")
    if limits.uid_nbytes and limits.session_nbytes > limits.uid_nbytes:
        raise contradiction("limits.session_nbytes", "limits.uid_nbytes")
    if waits.default_s > waits.max_s:
        raise contradiction("waits.default_s", "waits.max_s")
    _check_tiers(config, origin, contradiction)


def _check_tiers(config: Config, origin: Mapping[str, str], contradiction: Callable[[str, str], ConfigError]) -> None:
    tiers = config.tiers
    if tiers.low_watermark > tiers.high_watermark:
        raise contradiction("tiers.low_watermark", "tiers.high_watermark")
    if 0 < tiers.host.budget < MIN_HOST_BUDGET_NBYTES:
        raise ConfigError(
            f"tiers.host.budget must be 0 or at least {format_size(MIN_HOST_BUDGET_NBYTES)}; not "
            f"{format_size(tiers.host.budget)} ({origin['tiers.host.budget']})"
        )
