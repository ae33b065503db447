"""`kvd pools` and `kvd clients`: single tables of the status page, for scripts and for who knows what to look for."""

from __future__ import annotations

import os

import click
import msgspec

import kvd_client
from kvd.cli.console import console
from kvd.cli.options import runtime_dir_option
from kvd.cli.processes import processes_of
from kvd.cli.render_status import render_clients, render_pools
from kvd.cli.status import TIMEOUT_S
from kvd.cli.status_json import clients_as_fields
from kvd.status import Snapshot


def _snapshot(runtime_dir: str | None, label: str) -> Snapshot:
    with kvd_client.connect(runtime_dir, label=label, timeout_s=TIMEOUT_S) as client:
        return client.status()


@click.command()
@runtime_dir_option
@click.option("--json", "as_json", is_flag=True, help="The list `pools` of `kvd status --json`.")
def pools(runtime_dir: str | None, as_json: bool) -> None:
    """List the pools: segments, blocks in each state, evictions."""
    found = _snapshot(runtime_dir, "kvd pools").pools
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    elif found:
        console().print(render_pools(found))
    else:
        click.echo("no pools: nobody has opened a cache yet")


@click.command()
@runtime_dir_option
@click.option("--json", "as_json", is_flag=True, help="The list `clients` of `kvd status --json`.")
def clients(runtime_dir: str | None, as_json: bool) -> None:
    """List the clients: what each holds, maps and was spared."""
    snapshot = _snapshot(runtime_dir, "kvd clients")
    processes = processes_of(snapshot)
    others = [client for client in snapshot.clients if client.pid != os.getpid()]
    others.sort(key=lambda client: (-client.held_nbytes, client.session))
    if as_json:
        click.echo(msgspec.json.encode(clients_as_fields(others, processes)).decode())
    elif others:
        console().print(render_clients(others, processes))
    else:
        click.echo("no clients")
