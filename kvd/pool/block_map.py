"""A picture of a pool: one letter a block, or a letter for every few where there are many."""

from __future__ import annotations

import math

from kvd.block import BlockState
from kvd.pool.blocks import Block, SegmentState
from kvd.pool.store import BlockStore

MAX_LETTERS = 4096


def block_map(store: BlockStore, max_letters: int = MAX_LETTERS) -> tuple[str, int]:
    """The letters of `kvd.status.BLOCK_LETTERS` in the order of the block ids, and how many blocks each stands for.

    Looks at one block a letter, the first of those it stands for, so it takes O(max_letters) however large the pool is.
    """
    step = max(1, math.ceil(store.capacity / max_letters))
    letters = []
    offset = 0
    for segment_id in sorted(store.segments):
        segment = store.segments[segment_id]
        if segment.state is SegmentState.RETIRING:
            letters += ["-" if block is None else _letter(block) for block in segment.blocks[offset::step]]
        else:
            letters += map(_letter, segment.blocks[offset::step])
        # The steps go on across segments, so that the last letters stand for as many blocks as the first.
        offset = (offset - segment.num_blocks) % step
    return "".join(letters), step


def _letter(block: Block | None) -> str:
    if block is None:
        return "."
    if block.state is BlockState.RESERVED:
        return "w"
    if block.state is BlockState.FILLING:
        return "f"
    if block.num_references:
        return "u"
    return "b" if block.has_copy_below else "c"
