"""`kvd why`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

import kvd_client
from kvd.cli.explain import (
    Difference,
    alike_first,
    circumstances,
    differences,
    fields_of,
    fields_of_status,
    first_difference,
    variants,
)
from kvd.cli.options import runtime_dir_option
from kvd.cli.prompts import FORMAT_HELP, PromptFile, model_options, open_cache, read_prompt
from kvd.cli.text import count, one_line
from kvd.errors import InvalidRequest
from kvd.status import NamespaceStatus
from kvd_client.core.tier_verbs import Reach

MAX_COMPARED = 32
"""Namespaces that are asked about."""

_HELP = f"""\
Say how far a prompt is cached, and why no further.

Compares its namespace with those the daemon knows, field by field, and tries the usual accidents at the front of a
prompt. The daemon keeps hashes, not tokens: it can tell the block from which on nothing is found, but which token of it
differs only against another prompt that is at hand (--against). {FORMAT_HELP}"""


class Nearest(msgspec.Struct, frozen=True):
    """Another namespace. `num_tokens` of the prompt are cached there; 0 when it is only the most alike one."""

    digest: str
    model: str
    num_tokens: int
    differences: list[Difference]


class Against(msgspec.Struct, frozen=True):
    """The comparison with another file. `token` is the place of the first token that differs, null when none does."""

    file: str
    differences: list[Difference]
    token: int | None
    ours: int | None
    theirs: int | None
    num_tokens_cached: int


class Why(msgspec.Struct, frozen=True):
    """What `kvd why --json` prints. Token counts of the prompt's prefix, multiples of block_tokens."""

    file: str
    digest: str
    block_tokens: int
    num_tokens: int
    num_tokens_full: int
    num_resident: int
    by_tier: dict[str, int]
    nearest: Nearest | None
    variant: str | None
    variant_num_tokens: int
    against: Against | None
    circumstances: list[str]

    @property
    def num_found(self) -> int:
        """With all tiers together."""
        return max([self.num_resident, *self.by_tier.values()])


@click.command(help=_HELP)
@runtime_dir_option
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--against", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Compare with this prompt too."
)
@model_options
@click.option("--json", "as_json", is_flag=True, help="The same as an object.")
def why(runtime_dir: str | None, file: str, against: str | None, model: str | None, salt: str, as_json: bool) -> None:
    """Asks a daemon; pins and changes nothing there."""
    prompt = read_prompt(Path(file), model=model, salt=salt)
    other = None if against is None else (against, read_prompt(Path(against), model=model, salt=salt))
    with kvd_client.connect(runtime_dir, label="kvd why") as client:
        found = explain(client, file, prompt, other)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        click.echo("\n".join(sentences(found)))


def explain(client: kvd_client.Client, file: str, prompt: PromptFile, other: tuple[str, PromptFile] | None) -> Why:
    """Asks everything there is to know."""
    known = client.status().namespaces
    cache = open_cache(client, prompt.namespace)
    reach = cache.reach(prompt.token_ids)
    block_tokens = prompt.namespace.layout.block_tokens
    num_full = len(prompt.token_ids) // block_tokens * block_tokens
    found = _total(reach)
    nearest, variant, variant_tokens = None, None, 0
    if found < num_full:
        nearest = _nearest(client, prompt, cache.digest.hex(), known, found)
        variant, variant_tokens = _variant(cache, prompt, found)
    return Why(
        file=file,
        digest=cache.digest.hex(),
        block_tokens=block_tokens,
        num_tokens=len(prompt.token_ids),
        num_tokens_full=num_full,
        num_resident=reach.num_resident,
        by_tier=reach.by_tier,
        nearest=nearest,
        variant=variant,
        variant_num_tokens=variant_tokens,
        against=None if other is None else _against(client, prompt, *other),
        circumstances=circumstances(client.status(), cache.digest.hex()) if found < num_full else [],
    )


def _total(reach: Reach) -> int:
    return max([reach.num_resident, *reach.by_tier.values()])


def _nearest(
    client: kvd_client.Client, prompt: PromptFile, digest: str, known: list[NamespaceStatus], found: int
) -> Nearest | None:
    """The namespace that has more of the prompt than its own; else the most alike one, if the own one has nothing."""
    ours = fields_of(prompt.namespace)
    best: Nearest | None = None
    for one in alike_first(ours, digest, known)[:MAX_COMPARED]:
        try:
            num_tokens = _total(client.reach(bytes.fromhex(one.digest), one.block_tokens, prompt.token_ids))
        except InvalidRequest:
            continue  # of another tenant, or forgotten meanwhile
        this = Nearest(one.digest, one.model, num_tokens, differences(ours, fields_of_status(one)))
        if best is None or num_tokens > best.num_tokens:
            best = this
    if best is not None and best.num_tokens <= found and found:
        return None
    return best


def _variant(cache: kvd_client.Cache, prompt: PromptFile, found: int) -> tuple[str | None, int]:
    best, most = None, found
    for variant in variants(prompt.token_ids):
        num_tokens = _total(cache.reach(variant.token_ids))
        if num_tokens > most:
            best, most = variant.what, num_tokens
    return best, most if best else 0


def _against(client: kvd_client.Client, prompt: PromptFile, file: str, other: PromptFile) -> Against:
    at = first_difference(prompt.token_ids, other.token_ids)
    same = prompt.namespace == other.namespace
    return Against(
        file=file,
        differences=differences(fields_of(prompt.namespace), fields_of(other.namespace), same_digest=same),
        token=at,
        ours=None if at is None else prompt.token_ids[at],
        theirs=None if at is None else other.token_ids[at],
        num_tokens_cached=_total(open_cache(client, other.namespace).reach(other.token_ids)),
    )


def sentences(why: Why) -> list[str]:
    """The finding as lines of text. Pure."""
    full = count(why.num_tokens_full)
    lines = [f"{why.file}: {count(why.num_tokens)} tokens, {full} of them in full blocks of {why.block_tokens}"]
    width = max(len(name) for name in ("memory", *why.by_tier))
    lines += [
        f"  {one_line(name):<{width}}  {count(number)} of {full}"
        for name, number in [("memory", why.num_resident), *why.by_tier.items()]
    ]
    start = why.num_found
    if start == why.num_tokens_full:
        lines.append("All of it is found.")
    else:
        lines.append(
            f"Tokens {count(start)} to {count(start + why.block_tokens - 1)} are the first block found nowhere: "
            f"one of them differs from every cached prompt, or it was not computed, or is gone."
        )
    if (tail := why.num_tokens - why.num_tokens_full) and why.num_tokens_full:
        lines.append(f"The last {count(tail)} fill no block; those are always computed.")
    if why.nearest is not None:
        lines += _nearest_lines(why.nearest)
    if why.variant is not None:
        lines.append(
            f"The same prompt {why.variant} is cached for {count(why.variant_num_tokens)} tokens: two programs do not "
            f"tokenize alike."
        )
    if why.against is not None:
        lines += _against_lines(why.against)
    return lines + [one_line(text) for text in why.circumstances]


def _nearest_lines(nearest: Nearest) -> list[str]:
    first, *more = nearest.differences
    name = f"namespace {nearest.digest[:12]} ({one_line(nearest.model)})"
    head = (
        f"{count(nearest.num_tokens)} tokens of it are cached in {name}"
        if nearest.num_tokens
        else f"Nothing of it is cached in any other namespace; the most alike is {name}"
    )
    return [f"{head}, which differs in:", *(_line(one) for one in (first, *more))]


def _line(one: Difference) -> str:
    return f"  {one.field}: {one_line(one.ours)} here, {one_line(one.theirs)} there"


def _against_lines(against: Against) -> list[str]:
    cached = f"{count(against.num_tokens_cached)} of its tokens are cached"
    if against.differences:
        return [f"{against.file} is of another namespace, {cached}; it differs in:", *map(_line, against.differences)]
    if against.token is None:
        return [f"{against.file}: no token differs as far as both go, {cached}."]
    return [
        f"{against.file} differs from token {count(against.token)} on: {against.ours} here, {against.theirs} there; "
        f"{cached}."
    ]
