"""`kvd flush`."""

from __future__ import annotations

import click
import msgspec

import kvd_client
from kvd.block import HASH_NBYTES
from kvd.cli.options import runtime_dir_option
from kvd.cli.text import count, one_line
from kvd.errors import InvalidRequest, TierUnavailable
from kvd_client.core.tier_verbs import FlushOutcome

MIN_PREFIX = 4


@click.command()
@runtime_dir_option
@click.option("--namespace", metavar="DIGEST", help="This namespace: 64 hex digits, or the first few of a known one.")
@click.option("--model", metavar="NAME", help="Every namespace of this model, as `kvd status` names it.")
@click.option("--all", "everything", is_flag=True, help="Every namespace, also those that only a tier still holds.")
@click.option("--tier", metavar="NAME", help='Only this tier forgets; "pool" is memory alone.')
@click.option("--json", "as_json", is_flag=True, help="An object: num_namespaces, num_blocks, untold, unlisted.")
def flush(
    runtime_dir: str | None,
    namespace: str | None,
    model: str | None,
    everything: bool,
    tier: str | None,
    as_json: bool,
) -> None:
    """Forget cached blocks for good, in memory and every tier below.

    For when weights or code changed and the name did not. Sequences that are open keep their bytes until they are
    closed. A tier that is down is told before anything else is asked of it.

    --all and --model reach what an earlier run or another daemon left in the tiers, too. A tier that cannot be asked
    what it holds makes the command fail, with 1, after everything else was flushed: repeat it.
    """
    if sum((namespace is not None, model is not None, everything)) != 1:
        raise click.UsageError("name one of --namespace, --model and --all")
    for option, given in (("--namespace", namespace), ("--model", model), ("--tier", tier)):
        # An unset variable of a script; it must not widen what is forgotten.
        if given is not None and not given.strip():
            raise click.UsageError(f"{option} is empty")
    with kvd_client.connect(runtime_dir, label="kvd flush") as client:
        digest = None if namespace is None else _digest(client, namespace)
        flushed = client.flush(namespace=digest, model=model, tier=tier)
    if model is not None and not flushed.num_namespaces and not flushed.unlisted:
        raise InvalidRequest(f"no namespace of a model {model!r} is known here; `kvd status` lists the models")
    if as_json:
        fields = {name: getattr(flushed, name) for name in ("num_namespaces", "num_blocks", "untold", "unlisted")}
        click.echo(msgspec.json.encode(fields).decode())
    else:
        click.echo(_sentence(flushed))
    if flushed.unlisted:
        raise TierUnavailable(
            f"{', '.join(map(one_line, flushed.unlisted))} cannot say what else is held there, which was not flushed: "
            f"repeat this when `kvd status` shows it up"
        )


def _digest(client: kvd_client.Client, text: str) -> bytes:
    """The digest that a text of hex digits names. Raises `InvalidRequest`."""
    digits = text.strip().lower()
    if not digits or set(digits) - set("0123456789abcdef"):
        raise InvalidRequest(f"{text!r} is no digest; `kvd status --json` shows those of the namespaces")
    if len(digits) == 2 * HASH_NBYTES:
        return bytes.fromhex(digits)
    if len(digits) < MIN_PREFIX:
        raise InvalidRequest(f"{text!r} is too short: give at least {MIN_PREFIX} digits")
    snapshot = client.status()
    found = [one for one in snapshot.namespaces if one.digest.startswith(digits)]
    if len(found) != 1:
        names = ", ".join(f"{one.digest[:12]} ({one_line(one.model)})" for one in found) or "none"
        omitted = snapshot.num_namespaces_omitted
        more = f"; {count(omitted)} namespaces are not listed, so give the whole digest" if omitted else ""
        raise InvalidRequest(f"{text!r} must begin one known digest; it begins {names}{more}")
    return bytes.fromhex(found[0].digest)


def _sentence(flushed: FlushOutcome) -> str:
    what = "1 namespace" if flushed.num_namespaces == 1 else f"{count(flushed.num_namespaces)} namespaces"
    blocks = "1 block" if flushed.num_blocks == 1 else f"{count(flushed.num_blocks)} blocks"
    text = f"flushed {what}: {blocks} left memory"
    if flushed.untold:
        text += f"; down just now, and told before anything else: {', '.join(map(one_line, flushed.untold))}"
    return text
