"""`kvd status`: an ordinary client that asks for a snapshot and renders it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

import kvd_client
from kvd.cli.console import console
from kvd.cli.options import runtime_dir_option
from kvd.cli.processes import processes_of
from kvd.cli.render_status import render_status
from kvd.cli.status_json import as_json_line
from kvd.cli.text import one_line
from kvd.errors import ConnectionFailed, DaemonRestarted, KvdError, RequestTimeout
from kvd.status import Snapshot

LABEL = "kvd status"

TIMEOUT_S = 3.0
"""A daemon answers this at once or not at all, and someone looks on."""


@click.command()
@runtime_dir_option
@click.option(
    "--json", "as_json", is_flag=True, help="The snapshot as a line of JSON; docs/status.schema.json describes it."
)
@click.option("--watch", is_flag=True, help="Stay and show it again and again; survives a restart of the daemon.")
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, help="Seconds, for --watch."
)
@click.option("--count", type=click.IntRange(1), default=None, help="Stop --watch after so many times.")
def status(runtime_dir: str | None, as_json: bool, watch: bool, interval: float, count: int | None) -> None:
    """Show memory, pools, models and clients of the running daemon."""
    if not watch:
        with kvd_client.connect(runtime_dir, label=LABEL, timeout_s=TIMEOUT_S) as client:
            snapshot = client.status()
        processes = processes_of(snapshot)
        if as_json:
            click.echo(as_json_line(snapshot, processes))
        else:
            console().print(render_status(snapshot, processes, os.getpid()))
        return
    try:
        if as_json:
            for result in _snapshots(runtime_dir, interval, count):
                if isinstance(result, Snapshot):
                    click.echo(as_json_line(result, processes_of(result)))
                else:
                    click.echo(f"kvd: {one_line(str(result))}", err=True)
        else:
            _watch(runtime_dir, interval, count)
    except KeyboardInterrupt:
        return


def _snapshots(runtime_dir: str | None, interval_s: float, count: int | None) -> Iterator[Snapshot | KvdError]:
    """A snapshot, or why there is none just now, every `interval_s`; connects anew after the daemon went away."""
    num_left = count
    client: kvd_client.Client | None = None
    try:
        while num_left is None or num_left > 0:
            try:
                client = client or kvd_client.connect(runtime_dir, label=LABEL, timeout_s=TIMEOUT_S)
                yield client.status()
            except (ConnectionFailed, DaemonRestarted, RequestTimeout) as error:
                if client is not None:
                    client.close()
                    client = None
                yield error
            num_left = None if num_left is None else num_left - 1
            if num_left != 0:
                time.sleep(interval_s)
    finally:
        if client is not None:
            client.close()


def _watch(runtime_dir: str | None, interval_s: float, count: int | None) -> None:
    target = console()
    page: RenderableType = Text()
    if not target.is_terminal:
        for result in _snapshots(runtime_dir, interval_s, count):
            target.print(_page(result, page), "")
        return
    with Live(console=target, auto_refresh=False, vertical_overflow="crop") as live:
        for result in _snapshots(runtime_dir, interval_s, count):
            live.update(_page(result, page), refresh=True)
            page = _page(result, page) if isinstance(result, Snapshot) else page


def _page(result: Snapshot | KvdError, last: RenderableType) -> RenderableType:
    """The new page; while there is no daemon, the last one under the reason."""
    if isinstance(result, Snapshot):
        return render_status(result, processes_of(result), os.getpid())
    return Group(Text(one_line(str(result)), style="yellow"), last)
