"""Rows and how they are printed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.Enum):
    """What a row says."""

    RIGHT = "ok"
    WRONG = "WRONG"
    DIFFERS = "differs"  # from the fake driver, and nothing relies on it
    TOLD = ""  # a fact or a measurement


@dataclass(frozen=True)
class Row:
    """One line."""

    kind: str
    what: str
    verdict: Verdict
    found: str = ""


def expect(kind: str, what: str, right: bool, found: str = "") -> Row:
    """A row that is right or wrong."""
    return Row(kind, what, Verdict.RIGHT if right else Verdict.WRONG, found)


def render(rows: Sequence[Row], took_s: float) -> str:
    """The table, and a line of counts."""
    columns = [(row.kind, row.what, row.verdict.value, row.found) for row in rows]
    widths = [max(len(row[column]) for row in columns) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in columns
    ]
    counts = [f"{sum(row.verdict is verdict for row in rows)} {word}" for verdict, word in COUNTED]
    return "\n".join([*lines, f"{', '.join(counts)}; {took_s:.1f} s"])


COUNTED = ((Verdict.RIGHT, "right"), (Verdict.WRONG, "wrong"), (Verdict.DIFFERS, "differ from the fake"))
