"""The record of one block that is not FREE, the record of one segment, and the moves a block may make."""

from __future__ import annotations

import enum

import msgspec

from kvd.block import BlockId, BlockState, ChainHash, SegmentId
from kvd.errors import StateError
from kvd.pool.namespaces import NamespaceCounters


class Block(msgspec.Struct, gc=False, eq=False, weakref=False):
    """A block in any state but FREE; a free block has no record at all, so a record never outlives its block's content.

    There may be a million of these. Hence a struct the garbage collector does not track: it saves 16 bytes each, and a
    collection never has to walk them. The price: the links of the LRU and of the segment are cycles nobody would
    collect, so whoever takes a block out of them clears them.
    """

    id: BlockId
    segment: Segment
    state: BlockState
    hash: ChainHash | None = None
    """The hash it is found by; None while RESERVED, and again once it was un-indexed."""
    namespace: NamespaceCounters | None = None
    checksum: int = 0
    num_references: int = 0
    """Of sessions and of the mover."""
    stamp: int = 0
    """When it was last released, on the logical clock all pools of one budget share."""
    has_copy_below: bool = False
    older: Block = None  # type: ignore[assignment]  # None only while it is in no LRU list
    newer: Block = None  # type: ignore[assignment]  # likewise


class SegmentState(enum.Enum):
    """The life of a segment within its pool."""

    ACTIVE = "active"  # its free blocks may be allocated
    RETIRING = "retiring"  # no new blocks; leaves once wholly FREE
    GONE = "gone"  # left its pool; its number is never used again


class Segment:
    """One allocation of `num_blocks` blocks, whose ids are `first` and those after it."""

    __slots__ = ("blocks", "first", "id", "last_used", "num_blocks", "num_free", "num_idle", "state")

    def __init__(self, segment_id: SegmentId, num_blocks: int) -> None:
        self.id = segment_id
        self.num_blocks = num_blocks
        self.first = BlockId(segment_id * num_blocks)
        self.state = SegmentState.ACTIVE
        self.blocks: list[Block | None] = [None] * num_blocks
        """By index within the segment; None is FREE."""
        self.num_free = num_blocks
        self.num_idle = 0
        """Blocks in an LRU list: sealed, found by hash, referenced by nobody."""
        self.last_used = 0
        """The stamp of the latest release into it."""

    @property
    def num_pinned(self) -> int:
        """Blocks that somebody holds: reserved, filling, or referenced."""
        return self.num_blocks - self.num_free - self.num_idle


_LEGAL_MOVES = frozenset(
    {
        (BlockState.FREE, BlockState.RESERVED),
        (BlockState.FREE, BlockState.FILLING),
        (BlockState.RESERVED, BlockState.SEALED),
        (BlockState.RESERVED, BlockState.FREE),
        (BlockState.FILLING, BlockState.SEALED),
        (BlockState.FILLING, BlockState.FREE),
        (BlockState.SEALED, BlockState.FREE),
    }
)


def move(block: Block, to: BlockState) -> None:
    """Changes the block's state, or raises `StateError` naming block, from and to."""
    if (block.state, to) not in _LEGAL_MOVES:
        raise StateError(f"block {block.id} cannot move from {block.state.value} to {to.value}")
    block.state = to
