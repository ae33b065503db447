"""The blocks of one pool and every change of their state. Knows hashes and reference counts, but not who holds them.

Callers validate first; nothing here can fail half way. After every call:
free + reserved + filling + sealed + retiring = capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvd.block import NUM_BLOCK_IDS, BlockId, BlockState, ChainHash, SegmentId
from kvd.errors import OutOfBlocks, StateError
from kvd.pool.blocks import Block, Segment, SegmentState, move
from kvd.pool.clock import LogicalClock
from kvd.pool.free_runs import FreeRuns
from kvd.pool.lru import LruList, unlink
from kvd.pool.namespaces import NamespaceCounters
from kvd.pool.outcomes import DroppedSegment
from kvd.pool.prefix_index import PrefixIndex

IDS_USED_UP = "every block id was given to a segment once; restart the daemon to begin anew"


class BlockStore:
    """Segments, free runs, the prefix index, the two LRU lists and the counts over them."""

    def __init__(
        self, pool_id: int, blocks_per_segment: int, clock: LogicalClock, dropped: list[DroppedSegment]
    ) -> None:
        self.pool_id = pool_id
        self.blocks_per_segment = blocks_per_segment
        self._clock = clock
        self._dropped = dropped
        self._next_segment = 0
        self.segments: dict[SegmentId, Segment] = {}
        """ACTIVE and RETIRING ones."""
        self.free_runs = FreeRuns(blocks_per_segment)
        """Free blocks of ACTIVE segments only."""
        self.index = PrefixIndex()
        self.idle = LruList(copied=False)
        self.idle_copied = LruList(copied=True)
        self.num_retiring = 0
        """FREE blocks of RETIRING segments."""
        self.num_reserved = 0
        self.num_filling = 0
        self.num_sealed = 0
        self.num_referenced = 0
        """Sealed blocks with a reference; the other sealed ones are idle and may be evicted."""
        self.num_references = 0
        self.num_idle_copied = 0
        """Idle blocks with a copy below: whoever needs room loses nothing by taking theirs."""
        self.num_segments_dropped = 0

    @property
    def capacity(self) -> int:
        """Blocks in all segments."""
        return len(self.segments) * self.blocks_per_segment

    @property
    def num_segments_added(self) -> int:
        """Since the daemon's start; a counter."""
        return self._next_segment

    @property
    def num_addable(self) -> int:
        """Segments whose blocks there are still ids for.

        Numbers of segments that went are not used again: a client may hear of the new one before it hears that the
        old one went.
        """
        return NUM_BLOCK_IDS // self.blocks_per_segment - self._next_segment

    @property
    def num_free(self) -> int:
        """Blocks that can be taken at once."""
        return self.free_runs.num_free

    @property
    def num_idle(self) -> int:
        """Blocks that may be evicted."""
        return self.num_sealed - self.num_referenced

    def block(self, block_id: BlockId) -> Block | None:
        """The record of a block that is not FREE."""
        segment = self.segments.get(SegmentId(block_id // self.blocks_per_segment))
        return None if segment is None else segment.blocks[block_id - segment.first]

    def blocks(self) -> Iterator[Block]:
        """Every block that is not FREE."""
        for segment in self.segments.values():
            yield from filter(None, segment.blocks)

    def add_segment(self) -> SegmentId:
        """A new ACTIVE segment, wholly FREE. Raises `OutOfBlocks` when its last block would have no id."""
        if self.num_addable <= 0:
            raise OutOfBlocks(f"pool {self.pool_id} cannot grow: {IDS_USED_UP}")
        segment = Segment(SegmentId(self._next_segment), self.blocks_per_segment)
        self._next_segment += 1
        self.segments[segment.id] = segment
        self.free_runs.put(segment.first, segment.num_blocks)
        return segment.id

    def take(self, num_blocks: int, state: BlockState) -> list[Block]:
        """FREE -> RESERVED or FILLING. Evicts what is missing; the caller saw to it that enough is free or idle."""
        if num_blocks > self.free_runs.num_free:
            self._evict(num_blocks - self.free_runs.num_free)
        blocks: list[Block] = []
        for start, length in self.free_runs.take(num_blocks):
            segment = self.segments[SegmentId(start // self.blocks_per_segment)]
            run = [Block(BlockId(block_id), segment, state) for block_id in range(start, start + length)]
            offset = start - segment.first
            segment.blocks[offset : offset + length] = run
            segment.num_free -= length
            blocks += run
        if state is BlockState.RESERVED:
            self.num_reserved += num_blocks
        else:
            self.num_filling += num_blocks
        return blocks

    def fill(self, block: Block, namespace: NamespaceCounters, chain_hash: ChainHash) -> None:
        """A FILLING block is to become the one for this hash."""
        block.hash, block.namespace = chain_hash, namespace
        self.index.filling[chain_hash] = block

    def publish(
        self,
        block: Block,
        namespace: NamespaceCounters,
        chain_hash: ChainHash,
        checksum: int = 0,
        *,
        has_copy_below: bool = True,
    ) -> None:
        """RESERVED -> SEALED with one reference, or FILLING -> SEALED without: from now on others find it.

        `has_copy_below` matters to a filled block only: what a writer seals is new everywhere.
        """
        was_reserved = block.state is BlockState.RESERVED
        move(block, BlockState.SEALED)
        block.hash, block.namespace, block.checksum = chain_hash, namespace, checksum
        self.index.sealed[chain_hash] = block
        namespace.num_sealed += 1
        self.num_sealed += 1
        if was_reserved:
            block.num_references = 1
            self.num_reserved -= 1
            self.num_referenced += 1
            self.num_references += 1
        else:
            block.has_copy_below = has_copy_below
            block.stamp = self._clock.tick()
            self.num_filling -= 1
            self._settle(block)

    def reference(self, blocks: Sequence[Block]) -> None:
        """One reference more for every entry; sealed blocks only. From here on they cannot be evicted."""
        # This loop is what beginning a cached sequence costs. Blocks that were released together are neighbours in
        # their list, each the older one of that before it: a run is unlinked by joining what lies on its two sides.
        num_pinned = num_copied = num_in_segment = 0
        segment = newer = older = None
        for block in blocks:
            if block.num_references:
                block.num_references += 1
                continue
            block.num_references = 1
            if block is not older:
                if newer is not None and older is not None:
                    newer.older, older.newer = older, newer
                newer = block.newer
            older = block.older
            block.older = block.newer = None  # type: ignore[assignment]
            if block.segment is not segment:
                if segment is not None:
                    segment.num_idle -= num_in_segment
                segment, num_in_segment = block.segment, 0
            num_in_segment += 1
            num_pinned += 1
            if block.has_copy_below:
                num_copied += 1
        if segment is not None and newer is not None and older is not None:
            newer.older, older.newer = older, newer
            segment.num_idle -= num_in_segment
        self.num_referenced += num_pinned
        self.num_references += len(blocks)
        self.num_idle_copied -= num_copied

    def unreference(self, blocks: Sequence[Block]) -> None:
        """One reference less for every entry, given from head to tail of a sequence.

        The tail becomes the oldest: a prefix is worth most when it is whole from its head.
        """
        stamp = self._clock.tick()
        ends, ends_copied = self.idle.ends, self.idle_copied.ends
        active = SegmentState.ACTIVE
        num_unpinned = num_copied = 0
        leaving: list[Block] = []
        newest, newest_copied = ends.older, ends_copied.older
        for block in reversed(blocks):
            block.stamp = stamp
            block.num_references -= 1
            if block.num_references:
                continue
            num_unpinned += 1
            segment = block.segment
            if block.hash is None or segment.state is not active:
                leaving.append(block)
                continue
            # `newer` of the newest is set once the last one is known.
            if block.has_copy_below:
                block.older, newest_copied.newer = newest_copied, block
                newest_copied = block
                num_copied += 1
            else:
                block.older, newest.newer = newest, block
                newest = block
            segment.num_idle += 1
            segment.last_used = stamp
        newest.newer, ends.older = ends, newest
        newest_copied.newer, ends_copied.older = ends_copied, newest_copied
        self.num_referenced -= num_unpinned
        self.num_references -= len(blocks)
        self.num_idle_copied += num_copied
        if leaving:
            self.free(leaving)

    def unreference_copied(self, block: Block) -> None:
        """The mover gives its reference back. Copying is no use of the block, so its age stays what it was."""
        block.num_references -= 1
        self.num_references -= 1
        if not block.num_references:
            self.num_referenced -= 1
            self._settle(block)

    def free(self, blocks: Iterable[Block]) -> None:
        """RESERVED, FILLING or unreferenced SEALED -> FREE. Every trace of the old hash goes first."""
        reusable: list[BlockId] = []
        for block in blocks:
            if block.num_references:
                raise StateError(f"block {block.id} is to be freed with {block.num_references} references")
            self.index.forget(block)
            if block.state is BlockState.RESERVED:
                self.num_reserved -= 1
            elif block.state is BlockState.FILLING:
                self.num_filling -= 1
            else:
                self.num_sealed -= 1
            move(block, BlockState.FREE)
            segment = block.segment
            if block.newer is not None:
                unlink(block)
                segment.num_idle -= 1
                self.num_idle_copied -= block.has_copy_below
            segment.blocks[block.id - segment.first] = None
            segment.num_free += 1
            if segment.state is SegmentState.ACTIVE:
                reusable.append(block.id)
            else:
                self.num_retiring += 1
                self._drop_if_free(segment)
        self.free_runs.put_all(reusable)

    def unindex(self, block: Block) -> None:
        """The block answers to its hash no more. It is freed now, or by whoever gives its last reference back."""
        if block.state is BlockState.SEALED and not block.num_references:
            self.free([block])
        else:
            self.index.forget(block)

    def retire(self, segment: Segment) -> None:
        """ACTIVE -> RETIRING: idle blocks go at once, the others with their last holder; then the segment goes.

        Referenced blocks stay in the index until then: taking hits away would not free them any sooner.
        """
        if segment.state is not SegmentState.ACTIVE:
            raise StateError(f"segment {segment.id} cannot retire while {segment.state.value}")
        self.free_runs.remove_segment(segment.first)
        segment.state = SegmentState.RETIRING
        self.num_retiring += segment.num_free
        idle = [block for block in segment.blocks if block is not None and block.newer is not None]
        self._count_evictions(idle)
        self.free(idle)
        self._drop_if_free(segment)

    def unpinned(self) -> list[Segment]:
        """The ACTIVE segments nobody holds a block of; O(segments)."""
        return [s for s in self.segments.values() if s.state is SegmentState.ACTIVE and not s.num_pinned]

    def active(self) -> list[Segment]:
        """The segments that are not retiring; O(segments)."""
        return [s for s in self.segments.values() if s.state is SegmentState.ACTIVE]

    def num_active(self) -> int:
        """Segments that are not retiring; O(segments)."""
        return sum(s.state is SegmentState.ACTIVE for s in self.segments.values())

    def next_eviction(self) -> Block | None:
        """Which block goes first: one with a copy below before one without, the least recently used of its kind."""
        return self.idle_copied.oldest() or self.idle.oldest()

    def _evict(self, num_blocks: int) -> None:
        evicted = list(islice(self.idle_copied.oldest_first(), num_blocks))
        evicted += islice(self.idle.oldest_first(), num_blocks - len(evicted))
        if len(evicted) < num_blocks:
            raise StateError(f"pool {self.pool_id} is to evict {num_blocks} blocks, {len(evicted)} are idle")
        self._count_evictions(evicted)
        self.free(evicted)

    def _settle(self, block: Block) -> None:
        """An unreferenced sealed block takes its place by age, or leaves when nothing can find it there."""
        segment = block.segment
        if block.hash is None or segment.state is not SegmentState.ACTIVE:
            self.free([block])
            return
        (self.idle_copied if block.has_copy_below else self.idle).put_back(block)
        segment.num_idle += 1
        self.num_idle_copied += block.has_copy_below
        segment.last_used = max(segment.last_used, block.stamp)

    def _drop_if_free(self, segment: Segment) -> None:
        if segment.num_free < segment.num_blocks or segment.state is not SegmentState.RETIRING:
            return
        segment.state = SegmentState.GONE
        self.num_retiring -= segment.num_blocks
        del self.segments[segment.id]
        self.num_segments_dropped += 1
        self._dropped.append(DroppedSegment(self.pool_id, segment.id))

    @staticmethod
    def _count_evictions(blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.namespace is not None:
                block.namespace.evictions += 1
                block.namespace.dropped_unspilled += not block.has_copy_below


def age(segment: Segment) -> int:
    """The stamp to compare unpinned segments by: an empty one is the coldest of all."""
    return segment.last_used if segment.num_idle else -1
