"""One `[[pools]]` table: which caches it is about, and what is different for the pools they get."""

from __future__ import annotations

import pwd
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.block import PAGE_NBYTES

TEXT = "text"
"""Key of a `Meta.extra` that says in words which value a field takes."""

MAX_UID = (1 << 32) - 2
MAX_PATTERNS = 256
MAX_RULES = 256

SpillPolicy = Literal["on_evict", "write_through", "on_second_hit"]
AfterPromote = Literal["retain", "drop"]
Pattern = Annotated[str, Meta(min_length=1, max_length=1024)]
Patterns = Annotated[tuple[Pattern, ...], Meta(min_length=1, max_length=MAX_PATTERNS)]
_PATTERNS_TEXT = {TEXT: f"a list of 1 to {MAX_PATTERNS} patterns, each with every [ closed"}
User = Annotated[str, Meta(min_length=1, max_length=256)] | Annotated[int, Meta(ge=0, le=MAX_UID)]


class PoolRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pools of their own for some caches: what a rule says holds for them, what it leaves out is as in [tiers].

    A cache belongs to the first rule, in the order of the file, of which every given condition holds; each is a list,
    and one entry that fits is enough. A rule without conditions takes every cache that reaches it. Caches of no rule
    share the pools without a name.
    """

    name: Annotated[
        Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.\-]{1,64}\Z")],
        Meta(
            description="What `kvd status` calls these pools; no two rules have the same.",
            extra={TEXT: "text of 1 to 64 letters, digits and _ . -"},
        ),
    ]
    models: Annotated[
        Patterns,
        Meta(
            description="Condition: the cache's model fits one of these patterns, with * ? and [] as in file names, "
            "upper and lower case told apart.",
            extra=_PATTERNS_TEXT,
        ),
    ] = ()
    engines: Annotated[
        Patterns,
        Meta(description="Condition: its engine does, such as transformers/1.", extra=_PATTERNS_TEXT),
    ] = ()
    users: Annotated[
        Annotated[tuple[User, ...], Meta(min_length=1, max_length=MAX_PATTERNS)],
        Meta(
            description="Condition: the client runs as one of these users, by name or number. Users of different rules "
            "share no block in memory, whatever access.isolation says.",
            extra={TEXT: "a list of user names and numbers"},
        ),
    ] = ()
    device: Annotated[
        Annotated[str, Meta(pattern=r"\A(cpu|cuda:.{1,64})\Z")] | None,
        Meta(
            description="As memory.device, for these pools: cpu, or a card, which then has a budget of its own. Takes "
            "effect at the next start; left out, memory.device holds. A cache that names a device goes there.",
            extra={TEXT: "cpu, or cuda: and the number or UUID of a card"},
        ),
    ] = None
    budget: Annotated[
        Annotated[int, Meta(ge=PAGE_NBYTES, le=1 << 50)] | None,
        Meta(
            description="Memory for pools on the device that this rule names and memory.device does not; where several "
            "rules name it, the largest of theirs. Left out, it is as memory.budget = auto.",
            extra={"unit": "bytes"},
        ),
    ] = None
    spill: Annotated[
        SpillPolicy | None, Meta(description="As tiers.spill, for these pools; left out, tiers.spill holds.")
    ] = None
    after_promote: Annotated[
        AfterPromote | None,
        Meta(description="As tiers.after_promote, for these pools; left out, tiers.after_promote holds."),
    ] = None


def uid_of(user: str | int) -> int | None:
    """The number of a user, None for a name nobody has here."""
    if isinstance(user, int):
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def is_pattern(text: str) -> bool:
    """Whether every [ is closed: `fnmatch` takes an open one for itself, which is never what was meant."""
    position = 0
    while (position := text.find("[", position)) >= 0:
        start = position + 1 + text.startswith("!", position + 1)
        # The first character of a set may be its closing bracket.
        position = text.find("]", start + 1)
        if position < 0:
            return False
    return True
