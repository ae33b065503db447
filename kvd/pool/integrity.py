"""Every invariant of the pools, checked by counting anew: by tests after each step, by `kvd doctor` live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from kvd.block import BlockId, BlockState
from kvd.errors import StateError
from kvd.pool.blocks import Block, SegmentState
from kvd.pool.leases import Lease
from kvd.pool.lru import LruList
from kvd.pool.pool import Pool
from kvd.pool.sessions import Sessions


def check_pool(pool: Pool, sessions: Sessions) -> None:
    """Raises `StateError` naming the first invariant of this pool that does not hold. O(blocks)."""
    leases = [lease for session in sessions.by_id.values() if (lease := session.leases.get(pool.pool_id))]
    _check_segments(pool)
    _check_counts(pool)
    _check_lru(pool)
    _check_index(pool)
    _check_references(pool, leases)
    _check_reservations(pool, leases)
    _check_announcements(pool, leases)


def check_sessions(pools: Iterable[Pool], sessions: Sessions) -> None:
    """Raises `StateError` when the bytes a session or a user is charged with are not those it holds."""
    block_nbytes = {pool.pool_id: pool.block_nbytes for pool in pools}
    by_user: Counter[int] = Counter()
    for session in sessions.by_id.values():
        held = sum(lease.num_distinct * block_nbytes[pool_id] for pool_id, lease in session.leases.items())
        if session.held_nbytes != held:
            raise StateError(f"session {session.id} holds {held} bytes and is charged with {session.held_nbytes}")
        if sessions.users.get(session.user.uid) is not session.user:
            raise StateError(f"session {session.id} belongs to a user that is not known")
        by_user[session.user.uid] += held
    for user in sessions.users.values():
        if user.held_nbytes != by_user[user.uid]:
            raise StateError(f"uid {user.uid} holds {by_user[user.uid]} bytes and is charged with {user.held_nbytes}")
        if user.num_sessions != sum(session.user is user for session in sessions.by_id.values()):
            raise StateError(f"uid {user.uid} counts {user.num_sessions} sessions")


def _fail(pool: Pool, fault: str) -> NoReturn:
    raise StateError(f"pool {pool.pool_id}: {fault}")


def _check_segments(pool: Pool) -> None:
    store = pool.store
    free: list[int] = []
    for segment in store.segments.values():
        if segment.state is SegmentState.GONE:
            _fail(pool, f"segment {segment.id} is gone and still there")
        records = [block for block in segment.blocks if block is not None]
        if segment.num_free != segment.num_blocks - len(records):
            _fail(pool, f"segment {segment.id} counts {segment.num_free} free blocks")
        if segment.num_idle != sum(block.newer is not None for block in records):
            _fail(pool, f"segment {segment.id} counts {segment.num_idle} idle blocks")
        for index, block in enumerate(segment.blocks):
            if block is None:
                if segment.state is SegmentState.ACTIVE:
                    free.append(segment.first + index)
            elif block.id != segment.first + index or block.segment is not segment:
                _fail(pool, f"block {block.id} lies at {segment.first + index}")
            elif segment.state is SegmentState.RETIRING and block.newer is not None:
                _fail(pool, f"block {block.id} is idle in the retiring segment {segment.id}")
        if segment.state is SegmentState.RETIRING and not records:
            _fail(pool, f"segment {segment.id} is retiring, wholly free, and still there")
    in_runs = [block for start, length in store.free_runs.runs() for block in range(start, start + length)]
    if in_runs != sorted(free):
        _fail(pool, "the free runs are not the free blocks")
    if fault := store.free_runs.fault():
        _fail(pool, fault)


def _check_counts(pool: Pool) -> None:
    store = pool.store
    states = Counter(block.state for block in store.blocks())
    for state, counted in (
        (BlockState.RESERVED, store.num_reserved),
        (BlockState.FILLING, store.num_filling),
        (BlockState.SEALED, store.num_sealed),
        (BlockState.FREE, 0),
    ):
        if states[state] != counted:
            _fail(pool, f"{states[state]} blocks are {state.value}, {counted} are counted")
    retiring = sum(s.num_free for s in store.segments.values() if s.state is SegmentState.RETIRING)
    if retiring != store.num_retiring:
        _fail(pool, f"{retiring} free blocks are retiring, {store.num_retiring} are counted")
    total = store.num_free + store.num_reserved + store.num_filling + store.num_sealed + store.num_retiring
    if total != store.capacity:
        _fail(pool, f"free + reserved + filling + sealed + retiring is {total}, the capacity {store.capacity}")


def _check_lru(pool: Pool) -> None:
    store = pool.store
    linked: list[BlockId] = []
    for lru in (store.idle, store.idle_copied):
        linked += [block.id for block in _walk(pool, lru)]
    idle = [b.id for b in store.blocks() if b.state is BlockState.SEALED and not b.num_references]
    if sorted(linked) != sorted(idle):
        _fail(pool, "the LRU lists do not hold exactly the sealed blocks nobody references")
    if len(linked) != store.num_idle:
        _fail(pool, f"{len(linked)} blocks are idle, {store.num_idle} are counted")
    num_copied = sum(1 for _ in store.idle_copied.oldest_first())
    if num_copied != store.num_idle_copied:
        _fail(pool, f"{num_copied} idle blocks have a copy below, {store.num_idle_copied} are counted")


def _walk(pool: Pool, lru: LruList) -> Iterable[Block]:
    previous = lru.ends
    for block in lru.oldest_first():
        if block.older is not previous:
            _fail(pool, f"the LRU links around block {block.id} disagree")
        if previous is not lru.ends and previous.stamp > block.stamp:
            _fail(pool, f"block {block.id} is older than the one before it in the LRU")
        if block.has_copy_below is not lru.copied:
            _fail(pool, f"block {block.id} is in the wrong LRU list")
        if block.segment.last_used < block.stamp:
            _fail(pool, f"segment {block.segment.id} was used after its last use, by block {block.id}")
        previous = block
        yield block


def _check_index(pool: Pool) -> None:
    store = pool.store
    for by_hash, state in ((store.index.sealed, BlockState.SEALED), (store.index.filling, BlockState.FILLING)):
        for chain_hash, block in by_hash.items():
            if block.hash != chain_hash or block.state is not state or store.block(block.id) is not block:
                _fail(pool, f"the index names block {block.id} for a hash it does not stand for")
    for block in store.blocks():
        if block.state is BlockState.RESERVED and block.hash is not None:
            _fail(pool, f"block {block.id} is reserved and has a hash")
        by_hash = store.index.filling if block.state is BlockState.FILLING else store.index.sealed
        if block.hash is not None and by_hash.get(block.hash) is not block:
            _fail(pool, f"block {block.id} has a hash the index does not know it by")
        if block.state is BlockState.SEALED and block.hash is None and not block.num_references:
            _fail(pool, f"block {block.id} can be found by nobody and was not freed")
    sealed = Counter(b.namespace.digest for b in store.index.sealed.values() if b.namespace is not None)
    for namespace in pool.namespaces.values():
        if namespace.num_sealed != sealed[namespace.digest]:
            _fail(pool, f"namespace {namespace.digest.hex()} counts {namespace.num_sealed} sealed blocks")
        if namespace.lookups != namespace.hits + namespace.misses:
            _fail(pool, f"namespace {namespace.digest.hex()}: lookups are not hits + misses")


def _check_references(pool: Pool, leases: list[Lease]) -> None:
    store = pool.store
    counted: Counter[BlockId] = Counter()
    for lease in leases:
        if lease.extra_is_stray():
            _fail(pool, f"session {lease.session_id} counts further references on a block it does not hold")
        for block_id, block in lease.held.items():
            if store.block(block_id) is not block or block.state is not BlockState.SEALED:
                _fail(pool, f"session {lease.session_id} references block {block_id}, which is not sealed")
            counted[block_id] += lease.count(block_id)
    for block, _ in pool.transfers.spills.values():
        counted[block.id] += 1
    for held in pool.transfers.holds.values():
        counted.update(block.id for block in held)
    for block in store.blocks():
        if block.num_references != counted[block.id]:
            _fail(pool, f"block {block.id} counts {block.num_references} references, {counted[block.id]} are held")
    if store.num_references != counted.total():
        _fail(pool, f"{counted.total()} references are held, {store.num_references} are counted")
    if store.num_referenced != sum(count > 0 for count in counted.values()):
        _fail(pool, f"{store.num_referenced} blocks are counted as referenced")


def _check_reservations(pool: Pool, leases: list[Lease]) -> None:
    store = pool.store
    reserved = [block for lease in leases for block in lease.reserved.values()]
    if any(store.block(block.id) is not block or block.state is not BlockState.RESERVED for block in reserved):
        _fail(pool, "a lease reserves a block that is not reserved")
    if len({block.id for block in reserved}) != store.num_reserved or len(reserved) != store.num_reserved:
        _fail(pool, f"{store.num_reserved} blocks are reserved, {len(reserved)} by sessions")
    filled = list(pool.transfers.fills.values())
    if any(store.block(block.id) is not block or block.state is not BlockState.FILLING for block in filled):
        _fail(pool, "an open promotion fills a block that is not filling")
    if len(filled) != store.num_filling:
        _fail(pool, f"{store.num_filling} blocks are filling, {len(filled)} promotions are open")


def _check_announcements(pool: Pool, leases: list[Lease]) -> None:
    by_hash = pool.announcements.by_hash
    if by_hash != {chain_hash: lease for lease in leases for chain_hash in lease.announced}:
        _fail(pool, "the announcements are not those of the open sessions")
    if sum(len(lease.announced) for lease in leases) != len(by_hash):
        _fail(pool, "two sessions announced the same hash")
    for chain_hash in pool.announcements.wanted():
        if chain_hash not in by_hash and chain_hash not in pool.store.index.filling:
            _fail(pool, f"somebody waits for {chain_hash.hex()}, which nobody is producing")
