"""What the pool answers: plain values that name what happened or what must happen first. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.block import BlockId, ChainHash, NamespaceDigest, SegmentId


@dataclass(frozen=True, slots=True)
class Begun:
    """A sequence began: `blocks` are the `num_cached` referenced ones, then the reserved ones.

    The last `num_announced` hashes of the request start at the first one that this session now announces.
    """

    num_cached: int
    blocks: list[BlockId]
    num_announced: int


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Somebody else is producing `hash`. Nothing is held; ask again when `Pools.take_woken` names it, or give up."""

    hash: ChainHash
    is_filling: bool = field(default=False, compare=False)
    """A promotion brings it up, rather than another session computing it."""


@dataclass(frozen=True, slots=True)
class AskBelow:
    """Only the first `num_resident` blocks are here, and nobody is producing the next: a tier below may have it.

    Nothing is held. Bring up what is there, or not, and ask again without `ask_below`.
    """

    num_resident: int


@dataclass(frozen=True, slots=True)
class Grow:
    """The pool wants `num_segments` (at least 1) more. Nothing is held; give them with `Pool.add_segment`, ask again.

    When memory cannot be had, call `Pools.growth_failed` and ask again: the pool then evicts, or raises.
    """

    num_segments: int


@dataclass(frozen=True, slots=True)
class DroppedSegment:
    """A wholly FREE segment that left its pool: its memory must be punched and closed, its descriptors revoked."""

    pool_id: int
    segment_id: SegmentId


@dataclass(frozen=True, slots=True)
class FillTicket:
    """Write the bytes of `hash` into `block`, then call `Pool.complete_fill` exactly once."""

    pool_id: int
    block: BlockId
    generation: int
    """Names this copy; never used again in its pool, so that a late or second completion is recognised."""
    hash: ChainHash
    hold: int = 0
    """The hold that takes a reference on the block once it is there; 0 for none."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that a hold keeps."""

    block: BlockId
    hash: ChainHash
    checksum: int
    """What the writer gave at the seal; 0 for none."""


@dataclass(frozen=True, slots=True)
class SpillTicket:
    """Copy the bytes of `block` down under `hash`, then call `Pool.complete_spill` exactly once."""

    pool_id: int
    block: BlockId
    generation: int
    """Names this copy; never used again in its pool, so that a late or second completion is recognised."""
    hash: ChainHash
    namespace: NamespaceDigest
    checksum: int
    """What the writer gave at the seal; 0 for none."""


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """What one session holds over all pools."""

    num_references: int
    num_reserved: int
    held_nbytes: int
    """Bytes of the distinct blocks it references or has reserved; this is what quotas limit."""
    num_announced: int


@dataclass(frozen=True, slots=True)
class BudgetUsage:
    """The byte budget of one device, and what the pools use of it."""

    budget_nbytes: int
    used_nbytes: int
    """Bytes of all segments, the retiring ones included."""
    num_segments: int
    num_segments_retiring: int
    num_segments_draining: int = 0
    """Segments that left their pools, which clients have not closed yet; no part of the others."""
