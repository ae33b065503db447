"""Compares blocks with the checksums their writers gave, a bounded share of them a request.

Blocks in host memory are read on the loop, which is quick; those on a card by the mover, and held meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from kvd.block import BlockId, BlockState, ChainHash
from kvd.memory import HostBlock
from kvd.mover import Audit, Mover
from kvd.pool import Pool, Pools
from kvd.pool.blocks import Block
from kvd.service.segments import SegmentTable

MAX_NBYTES = 8 << 20
"""Bytes that one step reads: about a millisecond of the loop. One block at least."""
MAX_LOOKED_AT = 20_000
"""Blocks that one step looks at, read or not."""
_ID_BITS = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """A block on a card that is yet to be compared, held by `hold`."""

    pool: Pool
    block: BlockId
    hash: ChainHash
    checksum: int
    hold: int


class Step:
    """What one step found. `cursor` continues after it; 0 when there is nothing after it."""

    __slots__ = ("corrupt", "cursor", "left", "num_unchecked", "num_verified")

    def __init__(self) -> None:
        self.cursor = 0
        self.num_verified = 0
        self.num_unchecked = 0
        """Sealed blocks without a checksum, or on a card that could not be read."""
        self.corrupt: list[str] = []
        """Their hashes; nobody finds them any more."""
        self.left: list[Left] = []
        """Those that the mover has to read."""


def verify(pools: Pools, table: SegmentTable, cursor: int) -> Step:
    """Looks at sealed blocks from `cursor` on (0 is the first), in the order of pools and blocks. Loop thread only."""
    step = Step()
    nbytes = num_looked_at = 0
    for pool in pools.all:
        for block in _sealed(pool, cursor):
            if nbytes >= MAX_NBYTES or num_looked_at >= MAX_LOOKED_AT:
                step.cursor = _place(pool, block.id)
                return step
            num_looked_at += 1
            if not block.checksum:
                step.num_unchecked += 1
                continue
            nbytes += pool.block_nbytes
            if block.hash is None:
                continue
            memory = table.memory(pool, block.id)
            if not isinstance(memory, HostBlock):
                hold = pool.hold((block.hash,))
                step.left.append(Left(pool, block.id, block.hash, block.checksum, hold))
                continue
            with memory.view as data:
                found = xxhash.xxh3_64_intdigest(data)
            _compared(step, pool, block.id, block.hash, differs=found != block.checksum)
    return step


def verify_left(step: Step, table: SegmentTable, mover: Mover, on_done: Callable[[], None]) -> None:
    """Has the mover compare what the step left; `on_done` is called when the step is complete."""
    left = step.left

    def finish(job: Audit) -> None:
        for one, differs in zip(left, job.differs, strict=True):
            one.pool.end_hold(one.hold)
            if differs is None:
                step.num_unchecked += 1
            else:
                _compared(step, one.pool, one.block, one.hash, differs=differs)
        on_done()

    data = [table.memory(one.pool, one.block) for one in left]
    mover.submit([Audit(data, [one.checksum for one in left], finish)])


def _compared(step: Step, pool: Pool, block: BlockId, chain_hash: ChainHash, *, differs: bool) -> None:
    step.num_verified += 1
    if differs:
        _log.error("pool %d: block %d does not hold what its writer sealed; dropped", pool.pool_id, block)
        step.corrupt.append(chain_hash.hex())
        pool.forget_corrupt(chain_hash)


def _sealed(pool: Pool, cursor: int) -> Iterator[Block]:
    """The pool's sealed blocks that can be found, from the cursor on; a copy a segment, since they may go meanwhile."""
    store = pool.store
    for segment_id in sorted(store.segments):
        segment = store.segments.get(segment_id)
        if segment is None or _place(pool, segment.first + segment.num_blocks) <= cursor:
            continue
        for block in list(segment.blocks):
            if block is not None and _place(pool, block.id) >= cursor and _is_found(block):
                yield block


def _is_found(block: Block) -> bool:
    return block.state is BlockState.SEALED and block.hash is not None


def _place(pool: Pool, block_id: int) -> int:
    """Greater than 0, so that 0 can mean the end."""
    return ((pool.pool_id + 1) << _ID_BITS) + block_id
