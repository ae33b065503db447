"""The schema as a flat list of keys: dotted name, environment variable, flag, type in words, default, description."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from kvd.config.pool_rule import TEXT, PoolRule
from kvd.config.schema import SECONDS, SIZE, Config
from kvd.config.secrets import redacted
from kvd.config.sizes import format_size

ENVIRONMENT_PREFIX = "KVD_"

POOLS = "pools"
"""The tables of a file that are a list, and no section: their keys are `POOL_KEYS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One thing that can be configured.

    `section` is empty for a top-level key, dotted for a nested one; `hint` is the type for `msgspec.convert`.
    """

    section: str
    field: str
    hint: Any
    default: object
    description: str
    is_size: bool
    is_secret: bool
    """It may hold a password: shown by `format` only."""
    choices: tuple[str, ...]
    """The texts allowed; beside a number too ("auto")."""
    is_text: bool
    """It takes any text, perhaps of a certain form."""
    kind: str
    """What a value must be, in words: completes "must be ..."."""

    @property
    def name(self) -> str:
        """As in a file: section.field."""
        return f"{self.section}.{self.field}" if self.section else self.field

    @property
    def env(self) -> str:
        """As in the environment: KVD_SECTION_FIELD."""
        return ENVIRONMENT_PREFIX + self.name.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """As on a command line: --section-field."""
        return "--" + self.name.replace(".", "_").replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """All there are on a command line: a truth value has a flag for yes and one for no, without a value."""
        return (self.flag, f"--no-{self.flag[2:]}") if isinstance(self.default, bool) else (self.flag,)

    def format(self, value: object) -> str:
        """A value as people read and write it, without quotes and passwords."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.is_size and isinstance(value, int):
            return "0" if value == 0 else format_size(value)
        if self.is_secret:
            return redacted(str(value))
        return f"{value:g}" if isinstance(value, float) else str(value)


def _members(hint: Any) -> list[Any]:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (typing.Union, types.UnionType):
        return [part for member in get_args(hint) for part in _members(member)]
    return [hint]


def _meta(hint: Any, name: str) -> Any:
    """The first value that a `Meta` within the hint has for `name` (ge, le, multiple_of), None without any."""
    found: list[Any] = []
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        found = [getattr(meta, name) for meta in metas] + [_meta(inner, name)]
    elif get_origin(hint) in (typing.Union, types.UnionType):
        found = [_meta(member, name) for member in get_args(hint)]
    return next((value for value in found if value is not None), None)


def _kind(hint: Any, is_size: bool, unit: object, choices: tuple[str, ...], text: str) -> str:
    members = _members(hint)
    words = []
    if int in members or float in members:
        low, high = _meta(hint, "ge"), _meta(hint, "le")
        show = format_size if is_size else lambda number: f"{number:.8g}"
        noun = "a size" if is_size else "a whole number" if int in members else "a number"
        noun += " of seconds" if unit == SECONDS["unit"] else ""
        step = _meta(hint, "multiple_of")
        noun += f", a multiple of {show(step)}," if step else ""
        words.append(f"{noun} from {'0' if low == 0 else show(low)} to {show(high)}")
    if bool in members:
        words.append("true or false")
    if str in members or any(get_origin(member) is tuple for member in members):
        words.append(text)
    if choices:
        listed = ", ".join(choices)
        words.append(listed if words else f"one of {listed}" if len(choices) > 1 else listed)
    return ", or ".join(words)


def _key(section: str, field: msgspec.structs.FieldInfo, hint: Any) -> Key:
    meta = next(part for part in get_args(hint)[1:] if part.description)
    extra = meta.extra or {}
    unit = extra.get("unit")
    choices = tuple(choice for member in _members(hint) if get_origin(member) is Literal for choice in get_args(member))
    is_size = unit == SIZE["unit"]
    return Key(
        section=section,
        field=field.name,
        hint=hint,
        default=field.default,
        description=meta.description,
        is_size=is_size,
        is_secret=bool(extra.get("secret")),
        choices=choices,
        is_text=str in _members(hint),
        kind=_kind(hint, is_size, unit, choices, extra.get(TEXT, "text")),
    )


def _keys_of(struct: type[msgspec.Struct], section: str) -> list[Key]:
    """A section's own keys, then those of the sections within it."""
    hints = get_type_hints(struct, include_extras=True)
    found: list[Key] = []
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        if section == "" and field.name == POOLS:
            continue
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += _keys_of(hint, f"{section}.{field.name}" if section else field.name)
        else:
            found.append(_key(section, field, hint))
    return found


KEYS: dict[str, Key] = {key.name: key for key in _keys_of(Config, "")}
"""Dotted name -> key, in the order of the schema."""

POOL_KEYS: dict[str, Key] = {key.field: key for key in _keys_of(PoolRule, POOLS)}
"""What a `[[pools]]` table may have, by field; these have no variable and no flag."""

SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(key.section for key in KEYS.values() if key.section))


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, None when none is alike."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)
