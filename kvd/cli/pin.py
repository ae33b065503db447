"""`kvd pin`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

import kvd_client
from kvd.cli.console import console
from kvd.cli.options import runtime_dir_option
from kvd.cli.prompts import FORMAT_HELP, model_options, open_cache, read_prompt
from kvd.cli.render_status import render_pins
from kvd.cli.text import count, one_line
from kvd.cli.waiting import PATIENCE_S, watching
from kvd.status import PinStatus

_HELP = f"""\
Keep prompts resident, across restarts too.

What is cached of a prompt is held in memory; what a tier below has comes up; what nobody has computed yet is held as
soon as somebody does. With --list or --remove no FILE is needed. {FORMAT_HELP}
With --model, a FILE is plain text. Pins outlive the daemon where it has a state folder ($STATE_DIRECTORY, else
tiers.redis.persistence). limits.pinned bounds them."""


@click.command(help=_HELP)
@runtime_dir_option
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(exists=True, dir_okay=False))
@click.option("--list", "as_list", is_flag=True, help="List the pins.")
@click.option("--remove", metavar="PIN", multiple=True, help="End this pin; repeatable.")
@model_options
@click.option("--no-wait", is_flag=True, help="Return at once; what the tiers have comes up by itself.")
@click.option("--json", "as_json", is_flag=True, help="The list `pins` of `kvd status --json`, or those just made.")
def pin(
    runtime_dir: str | None,
    files: tuple[str, ...],
    as_list: bool,
    remove: tuple[str, ...],
    model: str | None,
    salt: str,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Reads every file before it pins the first."""
    if sum((bool(files), as_list, bool(remove))) != 1:
        raise click.UsageError("name a FILE, or --list, or --remove PIN")
    prompts = {name: read_prompt(Path(name), model=model, salt=salt) for name in files}
    with kvd_client.connect(runtime_dir, label="kvd pin") as client:
        for name in remove:
            client.unpin(name)
        made = {
            name: open_cache(client, prompt.namespace).pin(prompt.token_ids, label=Path(name).name)
            for name, prompt in prompts.items()
        }
        wanted = {pinned.pin for pinned in made.values()}
        pins = _await(client, wanted) if wanted and not no_wait else client.status().pins
    shown = [one for one in pins if not wanted or one.pin in wanted]
    if remove and not as_json:
        click.echo(f"removed {', '.join(remove)}")
    elif as_json:
        click.echo(msgspec.json.encode(shown).decode())
    elif as_list:
        if shown:
            console().print(render_pins(shown))
        else:
            click.echo("nothing is pinned")
    else:
        for one in shown:
            click.echo(_sentence(one))


def _await(client: kvd_client.Client, wanted: set[str]) -> list[PinStatus]:
    """Watches them come up from the tiers as long as there is progress."""
    tiers = client.status().tiers
    # Without a tier nothing more can come, but by somebody's computing.
    with watching("bringing up", patience_s=PATIENCE_S / 5 if tiers else 0.0) as watch:
        while True:
            pins = client.status().pins
            ours = [one for one in pins if one.pin in wanted]
            if not watch.moved(sum(one.num_tokens_resident for one in ours), sum(one.num_tokens for one in ours)):
                return pins


def _sentence(pin: PinStatus) -> str:
    text = f"{one_line(pin.label)}: pin {pin.pin}, {count(pin.num_tokens_resident)} of {count(pin.num_tokens)} tokens "
    text += "resident" if pin.num_tokens_resident == pin.num_tokens else "resident, the rest as soon as it is computed"
    return text + ("" if pin.is_lasting else "; not kept across a restart: the daemon has no state folder")
