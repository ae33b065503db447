"""`kvd spill`."""

from __future__ import annotations

import click
import msgspec

import kvd_client
from kvd.cli.options import runtime_dir_option
from kvd.cli.text import count
from kvd.cli.waiting import PATIENCE_S, watching
from kvd.errors import InvalidRequest, TierUnavailable
from kvd.status import Snapshot


@click.command()
@runtime_dir_option
@click.option("--no-wait", is_flag=True, help="Return at once; `kvd status` shows how it goes.")
@click.option(
    "--patience",
    type=click.FloatRange(0, 86400),
    default=PATIENCE_S,
    show_default=True,
    metavar="SECONDS",
    help="Give up after so long without progress.",
)
@click.option("--json", "as_json", is_flag=True, help="An object: num_copied, num_left.")
def spill(runtime_dir: str | None, no_wait: bool, patience: float, as_json: bool) -> None:
    """Copy every idle block that has no copy yet to the tiers below.

    They stay in memory too, but can be given up at any moment without losing them.
    """
    with kvd_client.connect(runtime_dir, label="kvd spill") as client:
        snapshot = client.status()
        if not snapshot.tiers:
            raise InvalidRequest("there is no tier below the pools; see [tiers] of the configuration")
        num_left = num_at_start = client.spill()
        if not no_wait:
            with watching("copying blocks down", patience_s=patience) as watch:
                while watch.moved(num_at_start - num_left, num_at_start):
                    num_left = client.spill()
                    # Sequences that close meanwhile leave more idle blocks behind.
                    num_at_start = max(num_at_start, num_left)
        if as_json:
            click.echo(msgspec.json.encode({"num_copied": num_at_start - num_left, "num_left": num_left}).decode())
        if num_left and not no_wait:
            raise TierUnavailable(f"{count(num_left)} blocks could not be copied: {_reason(client.status())}")
    if as_json:
        return
    if no_wait:
        click.echo(f"{count(num_left)} blocks are being copied")
    else:
        click.echo(f"{count(num_at_start)} blocks were copied; every idle block has a copy below")


def _reason(snapshot: Snapshot) -> str:
    return "; ".join(
        f"{tier.name} is {tier.state}: {tier.reason}" for tier in snapshot.tiers if tier.state != "up"
    ) or ("every tier is up, but full or too slow; `kvd status` counts the errors")
