"""What a smaller budget would take, before it does: which segments, and which of their blocks would be lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.block import BlockId, NamespaceDigest
from kvd.pool.blocks import Segment, SegmentState
from kvd.pool.pool import Pool


class Shrink:
    """Segments chosen once: copying their blocks makes them look held, which must not make others look better."""

    def __init__(self, chosen: Sequence[tuple[Pool, Segment]]) -> None:
        self._chosen = chosen

    def uncopied(self, accept: Callable[[NamespaceDigest], bool]) -> dict[int, list[BlockId]]:
        """By pool id, their idle blocks of accepted namespaces that have no copy below."""
        found: dict[int, list[BlockId]] = {}
        for pool, segment in self._chosen:
            if segment.state is not SegmentState.ACTIVE:
                continue
            blocks = [
                block.id
                for block in segment.blocks
                if block is not None
                and block.newer is not None
                and not block.has_copy_below
                and block.namespace is not None
                and accept(block.namespace.digest)
            ]
            if blocks:
                found.setdefault(pool.pool_id, []).extend(blocks)
        return found

    @property
    def num_copying(self) -> int:
        """Their blocks that are on the way down."""
        segments = {id(segment) for _, segment in self._chosen}
        pools = {pool.pool_id: pool for pool, _ in self._chosen}.values()
        return sum(id(block.segment) in segments for pool in pools for block, _ in pool.transfers.spills.values())
