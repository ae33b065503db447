"""Tables without lines, for what commands print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

REST_WIDTH = 16
"""Columns that the last one's text should have before others are left out for it."""
GAP = 2


def plain_table(*columns: tuple[str, str]) -> Table:
    """A column is its heading and how it stands: "l", "r", or "rest" for the last one.

    That one gets what the others leave of the width, and its text is cut to it.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for heading, kind in columns:
        if kind == "rest":
            table.add_column(heading, overflow="ellipsis", no_wrap=True, ratio=1)
        else:
            table.add_column(heading, justify="right" if kind == "r" else "left", no_wrap=True)
    return table


class Column(NamedTuple):
    """A heading, how it stands ("l", "r" or "rest") and when it goes.

    Where the terminal is narrow, columns are left out, those of the highest `rank` first; 0 is never.
    """

    heading: str
    kind: str
    rank: int = 0


class FittedTable:
    """A plain table that leaves columns out rather than cut a number."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Chooses by the width there is."""
        shown = self._fitting(options.max_width)
        table = plain_table(*((self._columns[at].heading, self._columns[at].kind) for at in shown))
        for row in self._rows:
            table.add_row(*(row[at] for at in shown))
        yield table

    def _fitting(self, width: int) -> list[int]:
        widths = [
            max([cell_len(column.heading), *(cell_len(str(row[at])) for row in self._rows)]) + GAP
            for at, column in enumerate(self._columns)
        ]
        for at, column in enumerate(self._columns):
            if column.kind == "rest":
                widths[at] = min(widths[at], REST_WIDTH)
        shown = list(range(len(self._columns)))
        while sum(widths[at] for at in shown) > width + GAP:
            goes = max(shown, key=lambda at: (self._columns[at].rank, at))
            if not self._columns[goes].rank:
                break
            shown.remove(goes)
        return shown
