"""Why a prompt is not found: compares namespaces field by field and prompts token by token. Pure.

The daemon keeps hashes, not tokens. So where two prompts part is known to the block, and to the token only of a prompt
that is at hand as a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec

from kvd.hashing import Namespace
from kvd.status import NamespaceStatus, Snapshot

HIDDEN = "(not shown)"
MAX_SHOWN = 60
LEADING_TOKENS = (0, 1, 2, 50256, 128000, 151643)
"""Ids that tokenizers put before a text: BOS of Llama 1 to 3, Gemma, GPT-2 and Qwen."""
MAX_LEADING = 3


class Difference(msgspec.Struct, frozen=True):
    """One field of a namespace that differs."""

    field: str
    ours: str
    theirs: str


class Variant(msgspec.Struct, frozen=True):
    """The prompt with other tokens at its front."""

    what: str
    token_ids: list[int]


def fields_of(namespace: Namespace) -> dict[str, str]:
    """What a namespace is made of, in the order in which it is compared; the salt only as whether there is one."""
    layout = namespace.layout
    return {
        "model": namespace.model,
        "engine": namespace.engine,
        "adapter": namespace.adapter,
        "dtype": layout.dtype,
        "block_tokens": str(layout.block_tokens),
        "num_layers": str(layout.num_layers),
        "num_kv_heads": str(layout.num_kv_heads),
        "head_dim": str(layout.head_dim),
        "positional": namespace.positional,
        "salt": "yes" if namespace.salt else "",
    }


def fields_of_status(status: NamespaceStatus) -> dict[str, str]:
    """The same of one that the daemon knows."""
    found = {name: str(getattr(status, name)) for name in fields_of_names() if name != "salt"}
    return found | {"salt": "yes" if status.has_salt else ""}


def fields_of_names() -> tuple[str, ...]:
    """In the order of the comparison."""
    return (
        "model", "engine", "adapter", "dtype", "block_tokens", "num_layers", "num_kv_heads", "head_dim", "positional",
        "salt",
    )  # fmt: skip


def differences(ours: dict[str, str], theirs: dict[str, str], *, same_digest: bool = False) -> list[Difference]:
    """The fields in which two namespaces differ, the first one first.

    Where all that can be seen is equal and the digests are not, the salts differ, which nobody shows.
    """
    found = [_difference(name, ours[name], theirs[name]) for name in fields_of_names() if ours[name] != theirs[name]]
    if not found and not same_digest:
        found.append(Difference("salt", HIDDEN, HIDDEN))
    return found


def _difference(name: str, ours: str, theirs: str) -> Difference:
    if name == "salt":
        return Difference(name, HIDDEN if ours else "none", HIDDEN if theirs else "none")
    if name == "positional":
        # Canonical JSON of the engines: the first key that differs says more than two long lines.
        try:
            left, right = json.loads(ours), json.loads(theirs)
        except ValueError:
            left = right = None
        if isinstance(left, dict) and isinstance(right, dict):
            for key in sorted({*left, *right}):
                if left.get(key) != right.get(key):
                    return Difference(f"positional.{key}", _short(left.get(key)), _short(right.get(key)))
    return Difference(name, _short(ours), _short(theirs))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if not text:
        return "none"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def alike_first(ours: dict[str, str], digest: str, known: Sequence[NamespaceStatus]) -> list[NamespaceStatus]:
    """The other namespaces with something in them, those first that differ in the fewest fields."""
    others = [one for one in known if one.digest != digest and one.num_sealed]
    return sorted(others, key=lambda one: (len(differences(ours, fields_of_status(one))), -one.num_sealed))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The place of the first token that differs; None when one list begins the other."""
    return next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)


def variants(token_ids: Sequence[int]) -> Iterator[Variant]:
    """The usual accidents at the front: a BOS too many, one too few."""
    for num in range(1, min(MAX_LEADING, len(token_ids) - 1) + 1):
        what = f"without its first token ({token_ids[0]})" if num == 1 else f"without its first {num} tokens"
        yield Variant(what, list(token_ids[num:]))
    for token in LEADING_TOKENS:
        yield Variant(f"with token {token} before it", [token, *token_ids])


def circumstances(snapshot: Snapshot, digest: str) -> list[str]:
    """What has happened in the namespace, and in the tiers, that can take a prompt away; a sentence each."""
    found = []
    own = next((one for one in snapshot.namespaces if one.digest == digest), None)
    counters = own.counters if own is not None else {}
    if own is None or not any(counters.get(name) for name in ("seals", "fills")):
        found.append("Nothing was ever published in this namespace since the daemon started.")
    if number := counters.get("flushed"):
        found.append(f"{number:,} blocks of this namespace were flushed since the daemon started.")
    if number := counters.get("evictions"):
        lost = counters.get("dropped_unspilled", 0)
        found.append(f"{number:,} of its blocks were evicted, {lost:,} of them without a copy below.")
    found += [
        f"The {tier.name} tier is {tier.state}, so what it holds cannot be told: {tier.reason}"
        for tier in snapshot.tiers
        if tier.state != "up"
    ]
    return found
