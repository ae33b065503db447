"""Blocks that are neighbours, in a segment and in a sequence: what one mapping, one view or one copy covers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvd.block import BlockId


def split_runs(blocks: Sequence[BlockId], blocks_per_segment: int) -> list[tuple[int, int]]:
    """(first place, number of blocks) of every run of neighbours within one segment, in order."""
    num_blocks = len(blocks)
    if not num_blocks:
        return []
    start = blocks[0]
    if start % blocks_per_segment + num_blocks <= blocks_per_segment and list(blocks) == list(
        range(start, start + num_blocks)
    ):
        return [(0, num_blocks)]
    starts = [
        place
        for place, (before, block) in enumerate(pairwise(blocks), 1)
        if block != before + 1 or not block % blocks_per_segment
    ]
    return [(first, stop - first) for first, stop in pairwise([0, *starts, num_blocks])]
