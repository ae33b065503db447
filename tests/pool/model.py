"""What the pools must do, as slow and plain as possible: dictionaries and sets, everything counted anew.

The model does not choose which idle block or which segment goes. It sees what went and decides whether that was right;
everything else (ids, references, states, waits, errors) it predicts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvd.block import BlockId, ChainHash, SegmentId, SessionId

Key = tuple[int, BlockId]
"""(pool id, block)"""
Named = tuple[int, ChainHash]
"""(pool id, hash)"""


@dataclass
class ModelSession:
    uid: int
    refs: Counter[Key] = field(default_factory=Counter)
    reserved: set[Key] = field(default_factory=set)
    announced: set[Named] = field(default_factory=set)


@dataclass
class ModelPool:
    pool_id: int
    block_nbytes: int
    per_segment: int
    segments: dict[SegmentId, bool] = field(default_factory=dict)
    """Whether each is active; the others are retiring."""
    num_segments_ever: int = 0
    found: dict[ChainHash, BlockId] = field(default_factory=dict)
    filling: dict[ChainHash, BlockId] = field(default_factory=dict)
    """Promotions whose outcome is still wanted."""
    content: dict[BlockId, str | ChainHash] = field(default_factory=dict)
    """What the bytes of each block are: a hash's KV, or who scribbles on it."""
    copied: set[BlockId] = field(default_factory=set)
    age: dict[BlockId, tuple[int, int]] = field(default_factory=dict)
    """(time of the last release, rank within it: tails are lower)."""
    put_back: set[BlockId] = field(default_factory=set)
    """Blocks a copy left out of order among those of the same time."""
    namespace_of: dict[ChainHash, bytes] = field(default_factory=dict)

    def segment_of(self, block: BlockId) -> SegmentId:
        return SegmentId(block // self.per_segment)

    def is_active(self, block: BlockId) -> bool:
        return self.segments[self.segment_of(block)]

    def blocks_of(self, segment: SegmentId) -> list[BlockId]:
        return [BlockId(segment * self.per_segment + index) for index in range(self.per_segment)]


class Model:
    def __init__(
        self, *, segment_nbytes: int, num_segments: int, floor: int, session_quota: int | None, uid_quota: int | None
    ) -> None:
        self.segment_nbytes = segment_nbytes
        self.budget_segments = num_segments
        self.refused_at: int | None = None
        self.floor_segments = floor
        self.session_quota = session_quota
        self.uid_quota = uid_quota
        self.pools: list[ModelPool] = []
        self.sessions: dict[SessionId, ModelSession] = {}
        self.fills: dict[tuple[int, int], tuple[BlockId, ChainHash]] = {}
        """(pool id, generation) -> what the mover writes where."""
        self.spills: dict[tuple[int, int], tuple[BlockId, ChainHash]] = {}
        self.wanted: set[Named] = set()
        self.woken: set[Named] = set()
        self.time = 0

    # What follows from the above.

    def refs(self, pool: ModelPool, block: BlockId) -> int:
        key = (pool.pool_id, block)
        of_mover = sum(1 for (pool_id, _), (spilled, _) in self.spills.items() if (pool_id, spilled) == key)
        return of_mover + sum(session.refs[key] for session in self.sessions.values())

    def referenced(self, pool: ModelPool) -> set[BlockId]:
        of_sessions = {b for s in self.sessions.values() for (p, b), n in s.refs.items() if n and p == pool.pool_id}
        return of_sessions | {block for (p, _), (block, _) in self.spills.items() if p == pool.pool_id}

    def reserved(self, pool: ModelPool) -> set[BlockId]:
        return {block for s in self.sessions.values() for p, block in s.reserved if p == pool.pool_id}

    def filled(self, pool: ModelPool) -> set[BlockId]:
        return {block for (p, _), (block, _) in self.fills.items() if p == pool.pool_id}

    def sealed(self, pool: ModelPool) -> set[BlockId]:
        return set(pool.found.values()) | self.referenced(pool)

    def pinned(self, pool: ModelPool) -> set[BlockId]:
        return self.referenced(pool) | self.reserved(pool) | self.filled(pool)

    def used(self, pool: ModelPool) -> set[BlockId]:
        return self.pinned(pool) | set(pool.found.values())

    def idle(self, pool: ModelPool) -> dict[BlockId, ChainHash]:
        pinned = self.pinned(pool)
        return {block: chain_hash for chain_hash, block in pool.found.items() if block not in pinned}

    def free(self, pool: ModelPool) -> set[BlockId]:
        used = self.used(pool)
        return {b for s, active in pool.segments.items() if active for b in pool.blocks_of(s) if b not in used}

    def unpinned_segments(self, pool: ModelPool) -> list[SegmentId]:
        pinned = self.pinned(pool)
        return [s for s, active in pool.segments.items() if active and pinned.isdisjoint(pool.blocks_of(s))]

    @staticmethod
    def num_active(pool: ModelPool) -> int:
        return sum(pool.segments.values())

    @property
    def limit(self) -> int:
        return self.budget_segments if self.refused_at is None else min(self.budget_segments, self.refused_at)

    @property
    def room(self) -> int:
        return max(0, self.limit - sum(len(pool.segments) for pool in self.pools))

    @property
    def floor(self) -> int:
        return min(self.floor_segments, self.limit // len(self.pools))

    def obtainable(self, asking: ModelPool) -> int:
        """Segments the pool could get if every other one gave what it can spare."""
        spare = sum(
            min(len(self.unpinned_segments(pool)), max(0, self.num_active(pool) - self.floor))
            for pool in self.pools
            if pool is not asking
        )
        return max(0, self.limit - sum(len(pool.segments) for pool in self.pools) + spare)

    def prefix(self, pool: ModelPool, hashes: list[ChainHash], limit: int) -> list[BlockId]:
        cached: list[BlockId] = []
        for chain_hash in hashes[:limit]:
            if chain_hash not in pool.found:
                break
            cached.append(pool.found[chain_hash])
        return cached

    def must_wait(self, session: SessionId, pool: ModelPool, chain_hash: ChainHash) -> bool:
        named = (pool.pool_id, chain_hash)
        return chain_hash in pool.filling or any(
            named in other.announced for sid, other in self.sessions.items() if sid != session
        )

    def held_nbytes(self, session: ModelSession) -> int:
        held = {key for key, count in session.refs.items() if count} | session.reserved
        return sum(self.pools[pool_id].block_nbytes for pool_id, _ in held)

    def over_quota(self, session: SessionId, pool: ModelPool, cached: list[BlockId], num_new: int) -> bool:
        record = self.sessions[session]
        new = {block for block in cached if not record.refs[pool.pool_id, block]}
        more = (len(new) + num_new) * pool.block_nbytes
        of_user = sum(self.held_nbytes(other) for other in self.sessions.values() if other.uid == record.uid)
        return (self.session_quota is not None and self.held_nbytes(record) + more > self.session_quota) or (
            self.uid_quota is not None and of_user + more > self.uid_quota
        )

    def may_be_served(self, pool: ModelPool, num_blocks: int, to_keep: list[BlockId]) -> bool:
        short = num_blocks - len(self.free(pool))
        evictable = len(self.idle(pool).keys() - set(to_keep))
        return short <= evictable + self.obtainable(pool) * pool.per_segment

    # What happened; each checks that it was allowed to.

    def evicted(self, pool: ModelPool, gone: set[ChainHash], num_needed: int, to_keep: list[BlockId]) -> None:
        """`gone` are the hashes no longer found, to serve `num_needed` blocks."""
        assert len(gone) == max(0, num_needed - len(self.free(pool))), "evicts what is missing, no more"
        idle = self.idle(pool)
        victims = {pool.found[chain_hash] for chain_hash in gone}
        assert victims <= idle.keys(), "evicts only what nobody holds"
        assert victims.isdisjoint(to_keep), "spares the prefix of the same request"
        staying = idle.keys() - victims - set(to_keep)
        assert all(self.goes_before(pool, victim, other) for victim in victims for other in staying), (
            "least recent first"
        )
        for chain_hash in gone:
            self.forget(pool, chain_hash)

    @staticmethod
    def goes_before(pool: ModelPool, victim: BlockId, other: BlockId) -> bool:
        one, two = ((block not in pool.copied, *pool.age[block]) for block in (victim, other))
        if victim in pool.put_back or other in pool.put_back:
            return one[:2] <= two[:2]
        return one < two

    def forget(self, pool: ModelPool, chain_hash: ChainHash) -> None:
        block = pool.found.pop(chain_hash)
        pool.copied.discard(block)
        pool.put_back.discard(block)

    def reserve(self, session: SessionId, pool: ModelPool, blocks: list[BlockId]) -> None:
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= self.free(pool), "gives out free blocks only"
        for block in blocks:
            self.sessions[session].reserved.add((pool.pool_id, block))
            pool.content[block] = f"session {session} writes"

    def reference(self, session: SessionId, pool: ModelPool, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.sessions[session].refs[pool.pool_id, block] += 1

    def seal(
        self,
        session: SessionId,
        pool: ModelPool,
        namespace: bytes,
        blocks: list[BlockId],
        hashes: list[ChainHash],
        standing: list[BlockId],
    ) -> None:
        record = self.sessions[session]
        for block, chain_hash, stands in zip(blocks, hashes, standing, strict=True):
            if chain_hash in pool.found:
                assert stands == pool.found[chain_hash], "the first block of a hash keeps it"
            else:
                assert stands == block
                record.reserved.remove((pool.pool_id, block))
                pool.found[chain_hash] = block
                pool.content[block] = chain_hash
                pool.namespace_of[chain_hash] = namespace
                pool.filling.pop(chain_hash, None)
            record.refs[pool.pool_id, stands] += 1
            self.end_announcement((pool.pool_id, chain_hash))
            self.wake((pool.pool_id, chain_hash))

    def release(self, session: SessionId, pool: ModelPool, blocks: list[BlockId], reserved: list[BlockId]) -> None:
        record = self.sessions[session]
        if blocks:
            self.time += 1
        for rank, block in enumerate(reversed(blocks)):
            record.refs[pool.pool_id, block] -= 1
            pool.age[block] = (self.time, rank)
            pool.put_back.discard(block)
            self.left(pool, block)
        for block in reserved:
            record.reserved.remove((pool.pool_id, block))

    def left(self, pool: ModelPool, block: BlockId) -> None:
        """A reference went: in a retiring segment an unreferenced block goes too."""
        if not self.refs(pool, block) and not pool.segments[self.segment_of(pool, block)]:
            for chain_hash in [h for h, b in pool.found.items() if b == block]:
                self.forget(pool, chain_hash)

    @staticmethod
    def segment_of(pool: ModelPool, block: BlockId) -> SegmentId:
        return pool.segment_of(block)

    def withdraw(self, session: SessionId, pool: ModelPool, hashes: list[ChainHash]) -> None:
        for chain_hash in hashes:
            named = (pool.pool_id, chain_hash)
            if named in self.sessions[session].announced:
                self.end_announcement(named)
                self.wake(named)

    def end_announcement(self, named: Named) -> None:
        for session in self.sessions.values():
            session.announced.discard(named)

    def wake(self, named: Named) -> None:
        if named in self.wanted:
            self.wanted.remove(named)
            self.woken.add(named)

    def end_session(self, session: SessionId) -> None:
        record = self.sessions[session]
        for named in list(record.announced):
            self.end_announcement(named)
            self.wake(named)
        record.reserved.clear()
        for pool in self.pools:
            held = [(block, count) for (p, block), count in record.refs.items() if p == pool.pool_id and count]
            self.time += 1
            for block, _ in held:
                record.refs[pool.pool_id, block] = 0
                pool.age[block] = (self.time, 0)
                pool.put_back.add(block)  # the order within one session's end is not the model's business
                self.left(pool, block)
        del self.sessions[session]

    def flush(self, pool: ModelPool, namespace: bytes) -> None:
        for chain_hash in [h for h in pool.found if pool.namespace_of[h] == namespace]:
            self.forget(pool, chain_hash)
        for chain_hash in [h for h in pool.filling if pool.namespace_of[h] == namespace]:
            del pool.filling[chain_hash]
            self.wake((pool.pool_id, chain_hash))

    def forget_one(self, pool: ModelPool, chain_hash: ChainHash) -> None:
        if chain_hash in pool.found:
            self.forget(pool, chain_hash)
        if chain_hash in pool.filling:
            del pool.filling[chain_hash]
            self.wake((pool.pool_id, chain_hash))

    def begin_fill(
        self, pool: ModelPool, namespace: bytes, chain_hash: ChainHash, block: BlockId, generation: int
    ) -> None:
        assert block in self.free(pool)
        assert (pool.pool_id, generation) not in self.fills
        self.fills[pool.pool_id, generation] = (block, chain_hash)
        pool.filling[chain_hash] = block
        pool.namespace_of[chain_hash] = namespace
        pool.content[block] = "the mover writes"

    def complete_fill(self, pool: ModelPool, generation: int, ok: bool) -> None:
        opened = self.fills.pop((pool.pool_id, generation), None)
        if opened is None:
            return
        block, chain_hash = opened
        assert pool.content[block] == "the mover writes", "nobody else got the block while it was filled"
        if pool.filling.get(chain_hash) != block:
            return
        del pool.filling[chain_hash]
        self.wake((pool.pool_id, chain_hash))
        if not ok:
            return
        self.end_announcement((pool.pool_id, chain_hash))
        if pool.is_active(block):
            self.time += 1
            pool.found[chain_hash] = block
            pool.content[block] = chain_hash
            pool.copied.add(block)
            pool.age[block] = (self.time, 0)

    def begin_spill(self, pool: ModelPool, block: BlockId, generation: int, chain_hash: ChainHash) -> None:
        assert pool.found[chain_hash] == block
        self.spills[pool.pool_id, generation] = (block, chain_hash)

    def complete_spill(self, pool: ModelPool, generation: int, ok: bool) -> None:
        opened = self.spills.pop((pool.pool_id, generation), None)
        if opened is None:
            return
        block, chain_hash = opened
        assert pool.content[block] == chain_hash, "nobody else got the block while it was copied"
        if ok and pool.found.get(chain_hash) == block:
            pool.copied.add(block)
        pool.put_back.add(block)
        self.left(pool, block)

    def add_segment(self, pool: ModelPool, segment: SegmentId) -> None:
        assert segment == pool.num_segments_ever, "segment numbers are never used again"
        assert self.room > 0
        pool.num_segments_ever += 1
        pool.segments[segment] = True

    def reclaimed(self, asking: ModelPool, pool: ModelPool, segment: SegmentId) -> None:
        """Another pool gave a segment to `asking`."""
        assert pool is not asking
        assert segment in self.unpinned_segments(pool), "takes only segments nobody holds a block of"
        assert self.num_active(pool) > self.floor, "leaves a pool its floor"
        self.retire(pool, segment)
        del pool.segments[segment]

    def retire(self, pool: ModelPool, segment: SegmentId) -> None:
        idle = self.idle(pool)
        pool.segments[segment] = False
        for block in pool.blocks_of(segment):
            if block in idle:
                self.forget(pool, idle[block])

    def leaving(self) -> set[tuple[int, SegmentId]]:
        """Retiring segments that are wholly free now, which the pools must have dropped."""
        gone = set()
        for pool in self.pools:
            used = self.used(pool)
            for segment, active in list(pool.segments.items()):
                if not active and used.isdisjoint(pool.blocks_of(segment)):
                    del pool.segments[segment]
                    gone.add((pool.pool_id, segment))
        return gone
