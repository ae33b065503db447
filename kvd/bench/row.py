"""One number, its limit and its target; and the timing that all rows share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

QUICK_ROUNDS = 7
FULL_ROUNDS = 25


class CannotMeasure(Exception):
    """A group of rows lacks something here (torch, memory); the message says what. Never leaves the bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`value` and `limit` are in `unit`; `ratio` is value / limit unless the row says otherwise; None if there is none.

    `ok` says whether the target is reached; it is None when the row could not be measured, and `note` says why.
    """

    name: str
    unit: str
    value: float | None
    limit: float | None = None
    ratio: float | None = None
    target: str
    ok: bool | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a row must reach: `at_most` and `at_least` bound its ratio, or its value where there is no limit."""

    name: str
    unit: str
    text: str
    at_most: float | None = None
    at_least: float | None = None

    def row(self, value: float, limit: float | None = None, *, ratio: float | None = None, note: str = "") -> Row:
        """The measured row. `ratio` is value / limit unless given."""
        if ratio is None and limit is not None:
            ratio = value / limit
        judged = value if ratio is None else ratio
        ok = (self.at_most is None or judged <= self.at_most) and (self.at_least is None or judged >= self.at_least)
        return Row(
            name=self.name, unit=self.unit, value=value, limit=limit, ratio=ratio, target=self.text, ok=ok, note=note
        )

    def missing(self, why: str) -> Row:
        """The row when it cannot be measured here."""
        return Row(name=self.name, unit=self.unit, value=None, target=self.text, ok=None, note=why)


@dataclass(frozen=True, slots=True)
class Run:
    """How a bench runs: rounds a measurement, and whom to tell about each step."""

    rounds: int = QUICK_ROUNDS
    step: Callable[[str], None] = field(default=lambda _text: None)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows measured together, in one run. Raises `CannotMeasure`, or a `KvdError` of what it measures."""

    targets: tuple[Target, ...]
    measure: Callable[[Run], list[Row]]


def interleaved(run: Run, measures: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each measure over `run.rounds` rounds; each takes every measure once. A warm-up round comes first.

    Interleaved, so that a machine that slows down slows value and limit alike; the order alternates.
    """
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(run.rounds + 1):
        for name in list(measures)[:: 1 if number % 2 else -1]:
            run.step(name)
            seconds = measures[name]()
            if number:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Median duration of one call over `repeat` calls in a row: what the scheduler takes away does not count."""
    return statistics.median(_once(call) for _ in range(repeat))


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
