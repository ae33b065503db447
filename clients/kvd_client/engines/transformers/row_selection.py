"""Which rows a batch goes on with: beams that move, rows that are repeated or left out.

What is wanted more than once is forked, so that its sealed blocks are there once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.errors import InvalidRequest
from kvd_client.engines.transformers.rows import CachedRow


def select(rows: list[CachedRow], wanted: list[int]) -> tuple[list[CachedRow], list[CachedRow]]:
    """Row i of the first list is what row wanted[i] is, moved where nobody else wants it, else forked; the second are
    those that nobody wants, still open. All or nothing: raises `InvalidRequest` for a row there is not, or none at all.
    """
    if not wanted or not all(0 <= number < len(rows) for number in wanted):
        raise InvalidRequest(f"rows {wanted} of {len(rows)}")
    again = [place for place, number in enumerate(wanted) if number in wanted[:place]]
    forks = fork_rows(rows, [wanted[place] for place in again])
    selected = [rows[number] for number in wanted]
    for place, fork in zip(again, forks, strict=True):
        selected[place] = fork
    return selected, [row for number, row in enumerate(rows) if number not in wanted]


def fork_rows(rows: list[CachedRow], numbers: Sequence[int]) -> list[CachedRow]:
    """A fork of each of these rows. All or none."""
    forks: list[CachedRow] = []
    try:
        forks.extend(rows[number].fork() for number in numbers)
    except BaseException:
        for fork in forks:
            fork.close()
        raise
    return forks


def repeated(num_rows: int, repeats: int) -> list[int]:
    """The number of every row `repeats` times, one after the other."""
    return [number for number in range(num_rows) for _ in range(repeats)]
