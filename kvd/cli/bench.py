"""`kvd bench`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click
import msgspec
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvd.bench.catalogue import NAMES, chosen, measure
from kvd.bench.row import FULL_ROUNDS, QUICK_ROUNDS, Group, Row, Run
from kvd.cli.console import console
from kvd.cli.render_bench import render_rows


@click.command(epilog=f"Rows: {', '.join(NAMES)}.")
@click.option("--quick", is_flag=True, help=f"{QUICK_ROUNDS} rounds a measurement rather than {FULL_ROUNDS}.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects: name, unit, value, limit, ratio, target, ok.")
@click.option("--only", metavar="NAME", multiple=True, help="Only this row, and those measured with it; repeatable.")
@click.option(
    "--engines", is_flag=True, help="The rows of the engines, which need one installed, rather than kvd's own."
)
@click.option("--strict", is_flag=True, help="Exit with 1 unless every row reaches its target.")
@click.pass_context
def bench(ctx: click.Context, quick: bool, as_json: bool, only: tuple[str, ...], engines: bool, strict: bool) -> None:
    """Measure kvd, each number beside its limit in the same run.

    Starts daemons of its own in temporary folders; one that runs already is left alone, but disturbs what is measured.
    A row that cannot be measured here says why.
    """
    # What was started is stopped by context managers, which a plain SIGTERM would skip.
    signal.signal(signal.SIGTERM, _terminated)
    rows = _rows_with_progress(chosen(only, engines=engines), quick=quick)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        console().print(render_rows(rows))
    if strict and not all(row.ok for row in rows):
        ctx.exit(1)


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _rows_with_progress(groups: Sequence[Group], *, quick: bool) -> list[Row]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    err = console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=len(groups))

        def step(text: str) -> None:
            progress.update(task, description=text)

        run = Run(rounds=QUICK_ROUNDS if quick else FULL_ROUNDS, step=step)
        return list(measure(groups, run, lambda _group: progress.advance(task)))
