"""Idle blocks in the order they were last used, as a list linked through the blocks themselves.

Intrusive, so that a block leaves the middle in O(1) without being searched for and without a node of its own. The
list is a ring through one sentinel, which is why unlinking needs neither a test nor to know which list it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from kvd.block import BlockId, BlockState
from kvd.pool.blocks import Block, Segment


class LruList:
    """One pool has two: of blocks that have a copy below (`copied`), and of blocks that do not.

    Invariant: a block is in a list exactly when it is SEALED, found by hash and referenced by nobody; stamps never
    fall from the oldest to the newest.
    """

    __slots__ = ("_finger", "copied", "ends")

    def __init__(self, *, copied: bool) -> None:
        self.copied = copied
        ends = Block(BlockId(-1), cast("Segment", None), BlockState.FREE)
        ends.older = ends.newer = ends
        self.ends = ends
        """The sentinel: `ends.newer` is the oldest block, `ends.older` the newest."""
        self._finger = ends

    def oldest(self) -> Block | None:
        """The block to evict next."""
        block = self.ends.newer
        return None if block is self.ends else block

    def oldest_first(self) -> Iterator[Block]:
        """Every block; the list must not change meanwhile."""
        block = self.ends.newer
        while block is not self.ends:
            yield block
            block = block.newer

    def newest_first(self) -> Iterator[Block]:
        """Every block; the list must not change meanwhile."""
        block = self.ends.older
        while block is not self.ends:
            yield block
            block = block.older

    def put_back(self, block: Block) -> None:
        """Links an unlinked block where its stamp says, without making it look used.

        Copies go down oldest first, so the place is next to where the last one went: the walk starts at that finger.
        """
        ends, stamp = self.ends, block.stamp
        finger = self._finger
        in_list = finger.newer is not None and (finger is ends or finger.has_copy_below is self.copied)
        older = finger if in_list else ends
        while older is not ends and older.stamp > stamp:
            older = older.older
        newer = older.newer
        # One sequence has one stamp, and its tail, which must stay the oldest, is copied first: among equals a block
        # that got its copy goes behind those before it, one that failed to goes to the front again.
        while newer is not ends and (newer.stamp < stamp or (self.copied and newer.stamp == stamp)):
            newer = newer.newer
        older = newer.older
        older.newer = newer.older = block
        block.older, block.newer = older, newer
        self._finger = block


def unlink(block: Block) -> None:
    """Takes a linked block out of whichever list it is in."""
    older, newer = block.older, block.newer
    older.newer, newer.older = newer, older
    block.older = block.newer = None  # type: ignore[assignment]
