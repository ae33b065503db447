"""What one session holds in one pool: references, reservations, announcements. It dies with the session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from kvd.block import BlockId, ChainHash, SessionId
from kvd.errors import NotOwned
from kvd.pool.blocks import Block


class Lease:
    """Checks are apart from changes: `references` and `reservations` raise and change nothing, the others never raise.

    Invariant: summed over all leases of a pool (and the mover's), the references are those its blocks count.
    """

    __slots__ = ("_extra", "announced", "held", "reserved", "session_id")

    def __init__(self, session_id: SessionId) -> None:
        self.session_id = session_id
        self.held: dict[BlockId, Block] = {}
        """Every block referenced at least once; whole prefixes come and go in one C call this way."""
        self._extra: dict[BlockId, int] = {}
        """References beyond the first, where there are any: forks, and sequences that share a prefix."""
        self.reserved: dict[BlockId, Block] = {}
        self.announced: dict[ChainHash, None] = {}

    @property
    def num_references(self) -> int:
        """Over all blocks, each as often as it is referenced."""
        return len(self.held) + sum(self._extra.values())

    @property
    def num_distinct(self) -> int:
        """Blocks held in whatever way; this is what counts against a quota."""
        return len(self.held) + len(self.reserved)

    def count(self, block_id: BlockId) -> int:
        """References to one block."""
        return self._extra.get(block_id, 0) + (block_id in self.held)

    def extra_is_stray(self) -> bool:
        """Whether further references are counted on a block without a first; never, unless kvd is at fault."""
        return not self._extra.keys() <= self.held.keys() or any(more < 1 for more in self._extra.values())

    def references(self, block_ids: Sequence[BlockId], *, to_drop: bool = False) -> list[Block]:
        """The blocks, all referenced here; `to_drop`: each as often as it is named. Raises `NotOwned`."""
        blocks = list(map(self.held.get, block_ids))
        if None in blocks:
            raise NotOwned(f"session {self.session_id} holds no reference on block {block_ids[blocks.index(None)]}")
        if to_drop and len(set(block_ids)) != len(block_ids):
            for block_id, named in Counter(block_ids).items():
                if named > (held := self.count(block_id)):
                    raise NotOwned(
                        f"session {self.session_id} holds {held} references on block {block_id}, not {named}"
                    )
        return cast("list[Block]", blocks)

    def reservations(self, block_ids: Sequence[BlockId]) -> list[Block]:
        """The blocks, all reserved here and each named once. Raises `NotOwned`."""
        blocks = list(map(self.reserved.get, block_ids))
        if None in blocks:
            raise NotOwned(f"session {self.session_id} has not reserved block {block_ids[blocks.index(None)]}")
        if len(set(block_ids)) != len(block_ids):
            raise NotOwned(f"session {self.session_id} names a reserved block twice in one request")
        return cast("list[Block]", blocks)

    def all_references(self) -> list[Block]:
        """Every reference in the order it was first taken, a block as often as it is referenced."""
        if not self._extra:
            return list(self.held.values())
        return [block for block_id, block in self.held.items() for _ in range(self.count(block_id))]

    def add_references(self, blocks: Sequence[Block]) -> list[BlockId]:
        """One reference more for every entry. Returns the ids."""
        held, before = self.held, len(self.held)
        block_ids = [block.id for block in blocks]
        fresh = not held or held.keys().isdisjoint(block_ids)
        if fresh:
            held.update(zip(block_ids, blocks, strict=True))
            if len(held) - before < len(block_ids):
                for block_id, named in Counter(block_ids).items():
                    if named > 1:
                        self._extra[block_id] = named - 1
            return block_ids
        for block_id, block in zip(block_ids, blocks, strict=True):
            if block_id in held:
                self._extra[block_id] = self._extra.get(block_id, 0) + 1
            else:
                held[block_id] = block
        return block_ids

    def drop_references(self, block_ids: Sequence[BlockId]) -> None:
        """One reference less for every entry; checked before with `references(..., to_drop=True)`."""
        held, extra = self.held, self._extra
        if not extra:
            for block_id in block_ids:
                del held[block_id]
            return
        for block_id in block_ids:
            more = extra.get(block_id, 0)
            if more > 1:
                extra[block_id] = more - 1
            elif more:
                del extra[block_id]
            else:
                del held[block_id]
