"""One pool: the verbs a session's requests become. Each validates everything, then takes effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from kvd.block import BlockId, BlockState, ChainHash, NamespaceDigest, SegmentId, SessionId
from kvd.errors import InvalidRequest, OutOfBlocks, OutOfMemory, StateError
from kvd.pool.announcements import Announcements
from kvd.pool.blocks import Block
from kvd.pool.budget import Budget
from kvd.pool.exchange import Exchange
from kvd.pool.leases import Lease
from kvd.pool.namespaces import NamespaceCounters, Namespaces, NamespaceWords
from kvd.pool.outcomes import AskBelow, Begun, Grow, WaitFor
from kvd.pool.quotas import Session
from kvd.pool.sessions import Sessions
from kvd.pool.store import IDS_USED_UP, BlockStore
from kvd.pool.transfers import Transfers

_NO_WORDS = NamespaceWords()


class Pool(Exchange):
    """All segments of one tenant, block size and name. Made by `Pools.pool`; loop thread only.

    No verb leaves half an effect behind. Where memory runs short, in this order: free blocks; `Grow` when the budget
    has room, perhaps after another pool's colder segment went; evicting our own idle blocks; `OutOfBlocks`.
    """

    def __init__(
        self,
        *,
        tenant: str,
        block_nbytes: int,
        name: str,
        device: str,
        source: Pool | None,
        store: BlockStore,
        budget: Budget,
        sessions: Sessions,
        woken: list[tuple[int, ChainHash]],
    ) -> None:
        self.pool_id = store.pool_id
        self.tenant = tenant
        self.block_nbytes = block_nbytes
        self.name = name
        """Of the rule it was made for; "" without one."""
        self.device = device
        """Where its segments are: "host", or a card's UUID."""
        self.source = source
        """The pool on a card that this one stands beside, for processes that cannot map that card; else None."""
        self.blocks_per_segment = store.blocks_per_segment
        self.store = store
        self.budget = budget
        self.sessions = sessions
        self.announcements = Announcements(store.pool_id, woken)
        self.transfers = Transfers(store, self.announcements)
        self.namespaces = Namespaces()
        self.num_allocations = 0
        self.num_out_of_blocks = 0

    def namespace(self, digest: NamespaceDigest, words: NamespaceWords = _NO_WORDS) -> NamespaceCounters:
        """The counters of one namespace, made at its first use; the words are kept from then on."""
        return self.namespaces.obtain(digest, words)

    def forget_namespaces(self, in_use: Collection[NamespaceDigest]) -> list[NamespaceDigest]:
        """Drops those that have no block, no copy under way, and are not `in_use`; their counts stay in the pool's."""
        copied = {block.namespace for block in self.transfers.fills.values()}
        copied |= {namespace for _, namespace in self.transfers.spills.values()}
        return self.namespaces.forget({*in_use, *(one.digest for one in copied if one is not None)})

    def add_segment(self) -> SegmentId:
        """Memory for one more segment is there: its blocks become FREE.

        Raises `OutOfBlocks` when the budget's room is gone meanwhile, or the block ids are: keep the memory and ask the
        request again.
        """
        if not self.budget.room:
            raise OutOfBlocks(
                f"the budget of {self.budget.budget_nbytes} bytes has no room for more segments in pool {self.pool_id}"
            )
        return self.store.add_segment()

    def begin(
        self,
        session: SessionId,
        namespace: NamespaceCounters,
        hashes: Sequence[ChainHash],
        *,
        max_cached: int,
        num_blocks: int,
        announce: bool,
        may_wait: bool,
        ask_below: bool = False,
        whole: bool = False,
        only_stores: bool = False,
    ) -> Begun | WaitFor | AskBelow | Grow:
        """References the longest resident prefix (`max_cached` blocks at most) and reserves the rest of `num_blocks`.

        With `announce`, the missing hashes are announced from the last one on that another session computes already.
        With `may_wait`, a first missing block that somebody else is producing gives `WaitFor`, and nothing is held.
        With `ask_below`, one that nobody is producing gives `AskBelow`, and nothing is held either.
        With `whole`, a prefix shorter than `max_cached` is told and not attached, and nothing is reserved or announced.
        With `only_stores`, blocks that are found do not count: nobody was going to compute them.
        """
        lease_holder = self.sessions.get(session)
        lease = self._lease(lease_holder)
        self._require_own(namespace)
        if max_cached < 0 or num_blocks < 0:
            raise InvalidRequest(f"max_cached={max_cached} and num_blocks={num_blocks} must not be negative")
        store = self.store
        limit = min(max_cached, num_blocks, len(hashes))
        cached = store.index.prefix(hashes, limit)
        num_cached = len(cached)
        if num_cached < limit and (may_wait or ask_below):
            missing = hashes[num_cached]
            if missing in store.index.filling or self.announcements.is_announced_by_another(missing, lease):
                if may_wait:
                    self.announcements.want(missing)
                    return WaitFor(missing, is_filling=missing in store.index.filling)
            elif ask_below:
                return AskBelow(num_cached)
        if whole:
            if num_cached < limit:
                namespace.lookups += limit
                namespace.misses += limit
                return Begun(num_cached, [], 0)
            num_blocks, announce = limit, False
        num_new = num_blocks - num_cached
        self._require_quota(lease_holder, lease, cached, num_new)
        if num_new > store.num_free and (grow := self._make_room(num_new, cached)):
            return grow
        # The prefix is referenced before anything is evicted for the rest, so it cannot be what is evicted.
        before = lease.num_distinct
        store.reference(cached)
        block_ids = lease.add_references(cached)
        block_ids += self._reserve(lease, num_new)
        lease_holder.charge((lease.num_distinct - before) * self.block_nbytes)
        num_announced = self._announce(lease, hashes, num_cached) if announce and num_cached < len(hashes) else 0
        num_hits = 0 if only_stores else num_cached
        namespace.lookups += num_hits + limit - num_cached
        namespace.hits += num_hits
        namespace.misses += limit - num_cached
        return Begun(num_cached, block_ids, num_announced)

    def reserve(self, session: SessionId, num_blocks: int) -> list[BlockId] | Grow:
        """`num_blocks` new reservations, all or none."""
        return self.retain(session, (), num_blocks)

    def retain(self, session: SessionId, blocks: Sequence[BlockId], num_blocks: int = 0) -> list[BlockId] | Grow:
        """One reference more per entry of `blocks`, which this session references, and `num_blocks` reservations."""
        lease_holder = self.sessions.get(session)
        lease = self._lease(lease_holder)
        if num_blocks < 0:
            raise InvalidRequest(f"num_blocks={num_blocks} must not be negative")
        shared = lease.references(blocks)
        self.sessions.quotas.require(lease_holder, num_blocks * self.block_nbytes)
        if num_blocks > self.store.num_free and (grow := self._make_room(num_blocks, ())):
            return grow
        self.store.reference(shared)
        lease.add_references(shared)
        lease_holder.charge(num_blocks * self.block_nbytes)
        return self._reserve(lease, num_blocks)

    def seal(
        self,
        session: SessionId,
        namespace: NamespaceCounters,
        blocks: Sequence[BlockId],
        hashes: Sequence[ChainHash],
        checksums: Sequence[int] | None = None,
    ) -> list[BlockId]:
        """Publishes written blocks; returns, for each, the block that now stands for its hash and is referenced.

        A hash that has a block already keeps it, and the writer's copy stays RESERVED: tensors may lie over it. That
        may hold more bytes than the quota for a while, since losing a race must not make a seal fail.
        """
        lease_holder = self.sessions.get(session)
        lease = self._lease(lease_holder)
        self._require_own(namespace)
        if len(blocks) != len(hashes) or (checksums and len(checksums) != len(blocks)):
            raise InvalidRequest(f"{len(blocks)} blocks, {len(hashes)} hashes and their checksums do not match")
        written = lease.reservations(blocks)
        store, index, announcements = self.store, self.store.index, self.announcements
        before = lease.num_distinct
        standing: list[BlockId] = []
        for position, (block, chain_hash) in enumerate(zip(written, hashes, strict=True)):
            existing = index.sealed.get(chain_hash)
            if existing is not None:
                store.reference((existing,))
                lease.add_references((existing,))
                namespace.duplicate_seals += 1
                standing.append(existing.id)
            else:
                filling = index.filling.get(chain_hash)
                if filling is not None:
                    index.forget(filling)  # its completion finds no hash and frees the block
                store.publish(block, namespace, chain_hash, checksums[position] if checksums else 0)
                del lease.reserved[block.id]
                lease.held[block.id] = block
                namespace.seals += 1
                standing.append(block.id)
            announcements.end(chain_hash)
        lease_holder.charge((lease.num_distinct - before) * self.block_nbytes)
        return standing

    def release(
        self,
        session: SessionId,
        *,
        blocks: Sequence[BlockId] = (),
        reserved: Sequence[BlockId] = (),
        hashes: Iterable[ChainHash] = (),
    ) -> None:
        """Gives back references (from head to tail of their sequence), reservations and announcements, all or none.

        Announcements that ended by themselves are passed over.
        """
        lease_holder = self.sessions.get(session)
        lease = self._lease(lease_holder)
        referenced = lease.references(blocks, to_drop=True)
        written = lease.reservations(reserved)
        before = lease.num_distinct
        if referenced:
            lease.drop_references(blocks)
            self.store.unreference(referenced)
        if written:
            for block_id in reserved:
                del lease.reserved[block_id]
            self.store.free(written)
        lease_holder.charge((lease.num_distinct - before) * self.block_nbytes)
        self.announcements.withdraw(lease, hashes)

    def end_lease(self, lease_holder: Session, *, keep_reserved: bool = False) -> None:
        """Everything the session holds here goes back, but perhaps for what it reserved; it never fails."""
        lease = lease_holder.leases.pop(self.pool_id, None)
        if lease is None:
            return
        lease_holder.charge(-lease.num_distinct * self.block_nbytes)
        self.store.unreference(lease.all_references())
        self.announcements.withdraw(lease, list(lease.announced))
        if keep_reserved and lease.reserved:
            kept = lease_holder.leases[self.pool_id] = Lease(lease_holder.id)
            kept.reserved = lease.reserved
            lease_holder.charge(kept.num_distinct * self.block_nbytes)
        else:
            self.store.free(lease.reserved.values())

    def match(self, hashes: Sequence[ChainHash]) -> int:
        """Length of the resident prefix in blocks. Pins nothing and makes nothing look used."""
        return len(self.store.index.prefix(hashes, len(hashes)))

    def checksums(self, session: SessionId, blocks: Sequence[BlockId]) -> list[int]:
        """What was given when the blocks were sealed, 0 for none. The session references all of them, or `NotOwned`."""
        return [block.checksum for block in self._lease(self.sessions.get(session)).references(blocks)]

    def drop_namespaces(self, digests: Collection[NamespaceDigest]) -> int:
        """Flush: no block of these namespaces is found from now on; referenced ones are freed by their last release.

        Returns how many hashes were forgotten. One pass over the index for all of them, none where nothing can be
        found.
        """
        index = self.store.index
        namespaces = {self.namespaces[one] for one in digests if one in self.namespaces}
        indices = [index.filling]
        if any(namespace.num_sealed for namespace in namespaces):
            indices.append(index.sealed)
        return self._forget(
            (chain_hash, block)
            for by_hash in indices
            for chain_hash, block in by_hash.items()
            if block.namespace in namespaces
        )

    def forget(self, namespace: NamespaceCounters, hashes: Iterable[ChainHash]) -> int:
        """No block of these hashes is found from now on; referenced ones are freed by their last release.

        Hashes of other namespaces are passed over. Returns how many were forgotten.
        """
        self._require_own(namespace)
        index = self.store.index
        return self._forget(
            (chain_hash, block)
            for chain_hash in dict.fromkeys(hashes)
            for by_hash in (index.filling, index.sealed)
            if (block := by_hash.get(chain_hash)) is not None and block.namespace is namespace
        )

    def _forget(self, found: Iterable[tuple[ChainHash, Block]]) -> int:
        doomed = list(found)
        for chain_hash, block in doomed:
            namespace, is_filling = block.namespace, block.state is BlockState.FILLING
            self.store.unindex(block)
            if is_filling:
                self.announcements.wake(chain_hash)  # this promotion will not deliver it any more
            if namespace is not None:
                namespace.flushed += 1
        return len(doomed)

    def counters(self) -> dict[str, int]:
        """The pool's own counters, and those of its namespaces summed."""
        return self.namespaces.totals() | {
            "allocations": self.num_allocations,
            "out_of_blocks": self.num_out_of_blocks,
            "failed_fills": self.transfers.failed_fills,
            "failed_spills": self.transfers.failed_spills,
            "segments_added": self.store.num_segments_added,
            "segments_dropped": self.store.num_segments_dropped,
        }

    def _lease(self, lease_holder: Session) -> Lease:
        lease = lease_holder.leases.get(self.pool_id)
        if lease is None:
            lease = lease_holder.leases[self.pool_id] = Lease(lease_holder.id)
        return lease

    def _require_own(self, namespace: NamespaceCounters) -> None:
        if self.namespaces.get(namespace.digest) is not namespace:
            raise StateError(f"namespace {namespace.digest.hex()} is not one of pool {self.pool_id}")

    def _require_quota(self, lease_holder: Session, lease: Lease, cached: Sequence[Block], num_new: int) -> None:
        quotas = self.sessions.quotas
        if quotas.allow(lease_holder, (len(cached) + num_new) * self.block_nbytes):
            return
        # Blocks it holds already count once only, which is worth finding out only near the limit.
        num_more = len({block.id for block in cached} - lease.held.keys()) + num_new
        quotas.require(lease_holder, num_more * self.block_nbytes)

    def _reserve(self, lease: Lease, num_blocks: int) -> list[BlockId]:
        if not num_blocks:
            return []
        blocks = self.store.take(num_blocks, BlockState.RESERVED)
        self.num_allocations += num_blocks
        block_ids = [block.id for block in blocks]
        lease.reserved.update(zip(block_ids, blocks, strict=True))
        return block_ids

    def _announce(self, lease: Lease, hashes: Sequence[ChainHash], num_cached: int) -> int:
        """Announces what is missing behind the last hash another session announced; returns the suffix's length.

        A resident hash in between needs no announcement, and one at the front is no reason to have any.
        """
        sealed, by_hash = self.store.index.sealed, self.announcements.by_hash
        start = len(hashes)
        while start > num_cached and by_hash.get(hashes[start - 1], lease) is lease:
            start -= 1
        while start < len(hashes) and hashes[start] in sealed:
            start += 1
        self.announcements.announce(lease, (h for h in hashes[start:] if h not in sealed))
        return len(hashes) - start

    def _make_room(self, num_blocks: int, to_keep: Sequence[Block]) -> Grow | None:
        """Called with fewer than `num_blocks` free. None: evicting idle blocks, `to_keep` spared, gives the rest.

        Raises `OutOfBlocks` before anything changed when nothing would do.
        """
        store, budget, per_segment = self.store, self.budget, self.blocks_per_segment
        num_short = num_blocks - store.num_free
        num_evictable = store.num_idle - len({block.id for block in to_keep if not block.num_references})
        if num_short > num_evictable + budget.num_obtainable(store) * per_segment:
            self._raise_out_of_blocks(num_blocks)
        if budget.failure and num_short <= num_evictable:
            return None
        num_segments = -(-num_short // per_segment)
        if not budget.room_for(store):
            coldest = store.next_eviction()
            budget.reclaim(store, num_segments, colder_than=coldest.stamp if coldest else None)
        if num_short > num_evictable + budget.room_for(store) * per_segment:
            num_needed = -(-(num_short - num_evictable) // per_segment)
            budget.reclaim(store, num_needed, colder_than=None)
        room = budget.room_for(store)
        return Grow(min(num_segments, room)) if room else None

    def _raise_out_of_blocks(self, num_blocks: int) -> NoReturn:
        self.num_out_of_blocks += 1
        store, budget = self.store, self.budget
        if budget.failure and not store.segments:
            raise OutOfMemory(f"pool {self.pool_id} has no memory and the machine gives none: {budget.failure}")
        refused = f"; the machine gave no more memory: {budget.failure}" if budget.failure else ""
        if not store.num_addable:
            refused += f"; {IDS_USED_UP}"
        num_kept = sum(map(len, self.transfers.holds.values()))
        kept = f", and {num_kept} by pinned prompts or copies" if num_kept else ""
        raise OutOfBlocks(
            f"{num_blocks} blocks are not to be had in pool {self.pool_id}: {store.num_free} of {store.capacity} are "
            f"free, {store.num_idle} evictable, {budget.room_for(store)} segments of {self.blocks_per_segment} may be "
            f"added; held by {self.sessions.holders(self.pool_id)}{kept}{refused}"
        )
