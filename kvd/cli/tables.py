"""Tables without lines, for what commands print."""

from __future__ import annotations

from rich.table import Table


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
