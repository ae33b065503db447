"""`kvd prefetch`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

import kvd_client
from kvd.cli.options import runtime_dir_option
from kvd.cli.prompts import FORMAT_HELP, PromptFile, open_cache, read_prompt
from kvd.cli.text import count
from kvd.cli.waiting import PATIENCE_S, watching

_HELP = f"""\
Bring prompts up from the tiers below before they are asked for.

For after a start: yesterday's documents are then in memory when the first request comes. {FORMAT_HELP}"""


class Prompt:
    """A prompt that is asked for when this is made."""

    def __init__(self, client: kvd_client.Client, file: PromptFile) -> None:
        self._token_ids = file.token_ids
        self._cache = open_cache(client, file.namespace)
        self._cache.prefetch(self._token_ids)

    def reach(self) -> tuple[int, int]:
        """Tokens of the prefix that are in memory, and that are there with all tiers together."""
        reach = self._cache.reach(self._token_ids)
        return reach.num_resident, max([reach.num_resident, *reach.by_tier.values()])


class Brought(msgspec.Struct, frozen=True):
    """What came of one file, in tokens."""

    file: str
    num_tokens: int
    num_resident: int
    num_below: int
    """In a tier below and not resident, although it continues the resident prefix."""


@click.command(help=_HELP)
@runtime_dir_option
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--no-wait", is_flag=True, help="Return at once; what the tiers have comes up by itself.")
@click.option(
    "--patience",
    type=click.FloatRange(0, 86400),
    default=PATIENCE_S,
    show_default=True,
    metavar="SECONDS",
    help="Give up on a file after so long without progress.",
)
@click.option("--json", "as_json", is_flag=True, help="A list: file, num_tokens, num_resident, num_below.")
def prefetch(runtime_dir: str | None, files: tuple[str, ...], no_wait: bool, patience: float, as_json: bool) -> None:
    """Asks for all of them first, so that they come up side by side, then watches one after another."""
    prompts = {name: read_prompt(Path(name)) for name in files}
    with kvd_client.connect(runtime_dir, label="kvd prefetch") as client:
        asked = {name: Prompt(client, one) for name, one in prompts.items()}
        results = []
        for name, prompt in asked.items():
            resident, there = prompt.reach() if no_wait else _await(name, prompt, patience)
            results.append(Brought(name, len(prompts[name].token_ids), resident, there - resident))
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
        return
    for result in results:
        text = f"{result.file}: {count(result.num_resident)} of {count(result.num_tokens)} tokens in memory"
        click.echo(text + (f", {count(result.num_below)} more below" if result.num_below else ""))


def _await(name: str, prompt: Prompt, patience_s: float) -> tuple[int, int]:
    with watching(Path(name).name, patience_s=patience_s) as watch:
        resident, there = prompt.reach()
        while watch.moved(resident, there):
            resident, there = prompt.reach()
    return resident, there
