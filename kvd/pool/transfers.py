"""Copies between a pool and the tiers below: what a promotion or a spill holds, and what its completion may still do.

A copy that runs cannot be taken back, so its block stays out of reach until the completion: a FILLING block is not
freed and a block being spilled holds the mover's reference, whatever happens to their hash meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.block import BlockState
from kvd.errors import StateError
from kvd.pool.announcements import Announcements
from kvd.pool.blocks import Block
from kvd.pool.namespaces import NamespaceCounters
from kvd.pool.outcomes import FillTicket, SpillTicket
from kvd.pool.store import BlockStore


class Transfers:
    """The open copies of one pool by generation. A generation that is not open any more completes nothing.

    A *hold* keeps what a promotion has gathered so far from being evicted before whoever waits for it comes to take its
    own references: a promoted block has a copy below and would be the first to go. Like every promotion it ends.
    """

    __slots__ = (
        "_announcements",
        "_next_generation",
        "_store",
        "failed_fills",
        "failed_spills",
        "fills",
        "holds",
        "spills",
    )

    def __init__(self, store: BlockStore, announcements: Announcements) -> None:
        self._store = store
        self._announcements = announcements
        self._next_generation = 1
        self.fills: dict[int, Block] = {}
        self.spills: dict[int, tuple[Block, NamespaceCounters]] = {}
        self.holds: dict[int, list[Block]] = {}
        """The mover has one reference per entry."""
        self.failed_fills = 0
        self.failed_spills = 0

    def begin_hold(self, blocks: Sequence[Block]) -> int:
        """A new hold of these blocks."""
        generation = self._generation()
        self._store.reference(blocks)
        self.holds[generation] = list(blocks)
        return generation

    def extend_hold(self, hold: int, block: Block) -> None:
        """One block more, if the hold is still open."""
        held = self.holds.get(hold)
        if held is not None:
            self._store.reference((block,))
            held.append(block)

    def end_hold(self, hold: int) -> None:
        """Its references go back. One that is not open (any more) changes nothing."""
        self._store.unreference(self.holds.pop(hold, ()))

    def begin_fill(self, ticket_for: Block, hold: int) -> FillTicket:
        """`ticket_for` was taken as FILLING and given its hash."""
        if ticket_for.hash is None:
            raise StateError(f"block {ticket_for.id} is to be filled for no hash")
        generation = self._generation()
        self.fills[generation] = ticket_for
        return FillTicket(self._store.pool_id, ticket_for.id, generation, ticket_for.hash, hold)

    def complete_fill(self, ticket: FillTicket, *, ok: bool, has_copy_below: bool, checksum: int = 0) -> None:
        """Publishes the block if its outcome is still wanted, else frees it."""
        block = self.fills.pop(ticket.generation, None)
        if block is None:
            return
        namespace = block.namespace
        self.failed_fills += not ok
        if block.hash is None or namespace is None:  # a seal was faster, or a flush came
            self._store.free([block])
            return
        del self._store.index.filling[ticket.hash]
        if ok:
            namespace.fills += 1
            self._store.publish(block, namespace, ticket.hash, checksum, has_copy_below=has_copy_below)
            if block.hash is not None:  # else its segment retires, and it was freed at once
                self.extend_hold(ticket.hold, block)
            self._announcements.end(ticket.hash)
        else:
            self._store.free([block])
            self._announcements.wake(ticket.hash)

    def begin_spill(self, block: Block) -> SpillTicket:
        """The mover takes a reference. Raises `StateError` unless the block is sealed, found by hash and not copied."""
        namespace = block.namespace
        if block.state is not BlockState.SEALED or block.hash is None or namespace is None:
            raise StateError(f"block {block.id} is {block.state.value} and not found by hash; it cannot be spilled")
        if block.has_copy_below or any(spilled is block for spilled, _ in self.spills.values()):
            raise StateError(f"block {block.id} has a copy below, or is being copied there")
        generation = self._generation()
        self._store.reference([block])
        self.spills[generation] = (block, namespace)
        return SpillTicket(self._store.pool_id, block.id, generation, block.hash, namespace.digest, block.checksum)

    def complete_spill(self, ticket: SpillTicket, *, ok: bool) -> None:
        """The mover's reference goes back; with `ok` the block counts as copied, if it still stands for that hash."""
        opened = self.spills.pop(ticket.generation, None)
        if opened is None:
            return
        block, namespace = opened
        self.failed_spills += not ok
        if ok and block.hash == ticket.hash:
            namespace.spills += 1
            block.has_copy_below = True
        self._store.unreference_copied(block)

    def _generation(self) -> int:
        generation = self._next_generation
        self._next_generation += 1
        return generation
