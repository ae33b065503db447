"""`kvd resize`."""

from __future__ import annotations

import click
import msgspec

import kvd_client
from kvd.cli.options import runtime_dir_option
from kvd.cli.text import count, size
from kvd.cli.waiting import PATIENCE_S, watching
from kvd.config.sizes import parse_size
from kvd.errors import ConfigError

QUIET_S = 2.0
"""What takes no longer is not worth a bar."""


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


@click.command()
@runtime_dir_option
@click.argument("nbytes", metavar="SIZE", type=_Size())
@click.option(
    "--device", default="", metavar="DEVICE", help="host, cuda:0, or a card's UUID or its beginning; else the main one."
)
@click.option(
    "--json", "as_json", is_flag=True, help="An object: device, budget_nbytes, used_nbytes, draining_nbytes, num_left."
)
def resize(runtime_dir: str | None, nbytes: int, device: str, as_json: bool) -> None:
    """Change how much memory the pools of a device may have.

    Less than they have is given back at once: blocks that nobody uses are copied to the tiers below and leave, the
    others as soon as their clients let go of them. It holds until the daemon stops; the configuration stays as it is.
    """
    with kvd_client.connect(runtime_dir, label="kvd resize") as client:
        done = client.resize(nbytes, device)
        if done.num_left:
            num_at_start = done.num_left
            with watching("copying blocks down", patience_s=PATIENCE_S * 6, quiet_s=QUIET_S) as watch:
                while watch.moved(num_at_start - done.num_left, num_at_start):
                    done = client.resize(nbytes, device)
                    num_at_start = max(num_at_start, done.num_left)
    if as_json:
        names = ("device", "budget_nbytes", "used_nbytes", "draining_nbytes", "num_left")
        shown = {name: getattr(done, name) for name in names}
        click.echo(msgspec.json.encode(shown).decode())
        return
    if done.num_left:
        click.echo(f"still copying {count(done.num_left)} blocks down; the budget becomes {size(nbytes)} after that")
    click.echo(f"{done.device}: a budget of {size(done.budget_nbytes)}, {size(done.used_nbytes)} in pools")
    held_nbytes = done.used_nbytes - done.budget_nbytes
    if held_nbytes > 0:
        click.echo(f"{size(held_nbytes)} above it are held by clients, and go back when they close their sequences")
    if done.draining_nbytes:
        click.echo(f"{size(done.draining_nbytes)} more go back when every client has closed its mappings of them")
