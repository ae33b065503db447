"""Rows of a bench as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.bench.row import Row
from kvd.cli.text import one_line

_WORDS = {True: ("ok", "green"), False: ("missed", "red"), None: ("-", "dim")}


def figure(value: float | None) -> str:
    """Three digits that count, "-" for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def render_rows(rows: Sequence[Row]) -> RenderableType:
    """The table, and below it what rows have to add."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for heading in ("row", "value", "limit", "ratio"):
        table.add_column(heading, justify="left" if heading == "row" else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("target", ratio=1)
    for row in rows:
        word, style = _WORDS[row.ok]
        value = figure(row.value) + (f" {row.unit}" if row.value is not None else "")
        ratio = "-" if row.ratio is None else f"{figure(row.ratio)}x"
        table.add_row(row.name, value, figure(row.limit), ratio, Text(word, style=style), row.target)
    notes = [Text(f"{row.name}: {one_line(row.note)}", style="dim") for row in rows if row.note]
    return Group(table, *([Text(), *notes] if notes else []))
