"""The side of a pool that faces the tiers below: blocks being brought up, blocks being copied down, and what is due."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvd.block import BlockId, BlockState, ChainHash, NamespaceDigest
from kvd.errors import OutOfBlocks, OutOfMemory, StateError
from kvd.pool.blocks import Block
from kvd.pool.budget import Budget
from kvd.pool.namespaces import NamespaceCounters
from kvd.pool.outcomes import FillTicket, Grow, HeldBlock, SpillTicket
from kvd.pool.store import BlockStore
from kvd.pool.transfers import Transfers

MAX_BLOCKS_PASSED_OVER = 256
"""How many blocks of namespaces that cannot be spilled now are stepped over in search of one that can."""


class Exchange(abc.ABC):
    """The verbs of `Pool` that no session asks for. They say what may be copied; who copies it reports back here."""

    store: BlockStore
    budget: Budget
    transfers: Transfers
    blocks_per_segment: int
    num_allocations: int

    def hold(self, hashes: Sequence[ChainHash]) -> int:
        """The mover references the longest resident prefix, until `end_hold`. The number names the hold."""
        return self.transfers.begin_hold(self.store.index.prefix(hashes, len(hashes)))

    def held(self, hold: int) -> list[HeldBlock]:
        """What an open hold keeps, in order."""
        blocks = self.transfers.holds.get(hold, ())
        return [HeldBlock(block.id, block.hash, block.checksum) for block in blocks if block.hash is not None]

    def end_hold(self, hold: int) -> None:
        """Its references go back; they count as a use of the blocks. A hold that has ended changes nothing."""
        self.transfers.end_hold(hold)

    def expects(self, chain_hash: ChainHash) -> bool:
        """Whether the hash is resident, or a promotion is bringing it up."""
        return chain_hash in self.store.index.sealed or chain_hash in self.store.index.filling

    def last_expected(self, hashes: Sequence[ChainHash]) -> int:
        """Place of the last hash that is resident or on its way up; -1 for none. Pins nothing."""
        return next((place for place in range(len(hashes) - 1, -1, -1) if self.expects(hashes[place])), -1)

    def is_filling(self, chain_hash: ChainHash) -> bool:
        """Whether a promotion is bringing the hash up."""
        return chain_hash in self.store.index.filling

    def begin_fill(
        self, namespace: NamespaceCounters, chain_hash: ChainHash, *, hold: int = 0
    ) -> FillTicket | Grow | None:
        """A block to promote `chain_hash` into; None when it is resident or on its way, or nothing may make room.

        The open hold `hold` takes a reference on the block when it is there.
        """
        self._require_own(namespace)
        index = self.store.index
        resident = index.sealed.get(chain_hash)
        if resident is not None:
            self.transfers.extend_hold(hold, resident)
            return None
        if chain_hash in index.filling:
            return None
        if not self.store.num_free:
            try:
                grow = self._make_room(1, ())
            except (OutOfBlocks, OutOfMemory):
                return None
            if grow:
                return grow
        (block,) = self.store.take(1, BlockState.FILLING)
        self.num_allocations += 1
        self.store.fill(block, namespace, chain_hash)
        return self.transfers.begin_fill(block, hold)

    def complete_fill(self, ticket: FillTicket, ok: bool, *, has_copy_below: bool = True, checksum: int = 0) -> None:
        """The promotion ended. A ticket that is not open (any more) changes nothing. `checksum` is the writer's."""
        self.transfers.complete_fill(ticket, ok=ok, has_copy_below=has_copy_below, checksum=checksum)

    @property
    def num_expendable(self) -> int:
        """Blocks that can be had without losing one: free, idle with a copy below, or still in the budget."""
        return self.store.num_free + self.store.num_idle_copied + self._num_growable

    @property
    def num_uncopied(self) -> int:
        """Blocks without a copy below that are idle, or on their way down: what a stop at this moment would lose."""
        return self.store.num_idle - self.store.num_idle_copied + len(self.transfers.spills)

    @property
    def num_in_transit(self) -> int:
        """Blocks that copies hold, which end soon and depend on no session."""
        return len(self.transfers.spills) + len(self.transfers.fills)

    @property
    def is_held(self) -> bool:
        """Whether anybody references or writes a block: a session, a copy, or what keeps a prefix for one."""
        return bool(self.store.num_references or self.store.num_reserved or self.store.num_filling)

    @property
    def num_attainable(self) -> int:
        """Blocks the pool has, and those still in the budget; what watermarks are fractions of."""
        return self.store.capacity + self._num_growable

    @property
    def _num_growable(self) -> int:
        return self.budget.room_for(self.store) * self.blocks_per_segment

    def spill_candidates(
        self, limit: int, *, newest_first: bool = False, accept: Callable[[NamespaceDigest], bool] | None = None
    ) -> list[BlockId]:
        """Idle blocks without a copy below, those first that would be evicted first, or last.

        `accept` says of which namespaces; no more than a few times `limit` blocks are looked at.
        """
        blocks = self.store.idle.newest_first() if newest_first else self.store.idle.oldest_first()
        if accept is None:
            return [block.id for block in islice(blocks, limit)]
        seen = islice(blocks, max(MAX_BLOCKS_PASSED_OVER, limit))
        wanted = (b.id for b in seen if b.namespace is not None and accept(b.namespace.digest))
        return list(islice(wanted, limit))

    def without_copy(self, chain_hashes: Iterable[ChainHash]) -> list[BlockId]:
        """The resident blocks of these hashes that have no copy below and are not being copied; referenced or not."""
        sealed = self.store.index.sealed
        copying = {block.id for block, _ in self.transfers.spills.values()}
        found = (b for h in chain_hashes if (b := sealed.get(h)) is not None and not b.has_copy_below)
        return [block.id for block in found if block.id not in copying]

    def forget_corrupt(self, chain_hash: ChainHash) -> None:
        """The bytes of this block are not what its writer sealed: nobody finds it from now on."""
        block = self.store.index.sealed.get(chain_hash)
        if block is not None:
            self.store.unindex(block)

    def begin_spill(self, block: BlockId) -> SpillTicket:
        """The block's bytes stay as they are until the completion. Raises `StateError` unless it can be spilled."""
        record = self.store.block(block)
        if record is None:
            raise StateError(f"block {block} is free; it cannot be spilled")
        return self.transfers.begin_spill(record)

    def complete_spill(self, ticket: SpillTicket, ok: bool) -> None:
        """The copy ended. A ticket that is not open (any more) changes nothing."""
        self.transfers.complete_spill(ticket, ok=ok)

    @abc.abstractmethod
    def _make_room(self, num_blocks: int, to_keep: Sequence[Block]) -> Grow | None:
        """See `Pool`."""

    @abc.abstractmethod
    def _require_own(self, namespace: NamespaceCounters) -> None:
        """See `Pool`."""
