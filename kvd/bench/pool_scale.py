"""scale_1k_1m.

Timed: begin over a resident 250-block chain and its release, in the pool itself, divided by its blocks, with 1 k to 1 M
sealed blocks in the pool; chains are picked at random, and their hashes are fresh objects as they come out of a
message. The garbage collector is set as the daemon sets it. Ratio: 1 M to 1 k.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved, seconds
from kvd.block import PAGE_NBYTES, ChainHash, NamespaceDigest, SessionId
from kvd.daemon.process import calm_garbage_collector
from kvd.hashing import pack_hashes, unpack_hashes
from kvd.pool import Begun, NamespaceCounters, Pool, Pools

CHAIN_BLOCKS = 250
SIZES = (1_000, 10_000, 100_000, 1_000_000)
CHAINS_A_ROUND = 20
SESSION = SessionId(1)

TARGET = Target(name="scale_1k_1m", unit="ns a block", text="1 M blocks <= 1.5x 1 k", at_most=1.5)


class FullPool:
    """A pool that holds `num_blocks` sealed, unreferenced blocks in chains."""

    def __init__(self, num_blocks: int) -> None:
        nbytes = num_blocks * PAGE_NBYTES
        pools = Pools(budget_nbytes=nbytes, segment_nbytes=nbytes)
        pools.open_session(SESSION, uid=0)
        self.pool: Pool = pools.pool("bench", PAGE_NBYTES)
        self.namespace: NamespaceCounters = self.pool.namespace(NamespaceDigest(bytes(32)))
        self.pool.add_segment()
        self.packed_chains: list[bytes] = []
        for _ in range(num_blocks // CHAIN_BLOCKS):
            hashes = [ChainHash(os.urandom(32)) for _ in range(CHAIN_BLOCKS)]
            begun = self.begin(hashes, max_cached=0)
            blocks = self.pool.seal(SESSION, self.namespace, begun.blocks, hashes)
            self.pool.release(SESSION, blocks=blocks)
            self.packed_chains.append(pack_hashes(hashes))
        self._choose = random.Random(num_blocks)

    def begin(self, hashes: Sequence[ChainHash], max_cached: int) -> Begun:
        """Attaches up to `max_cached` blocks and reserves the rest."""
        begun = self.pool.begin(
            SESSION,
            self.namespace,
            hashes,
            max_cached=max_cached,
            num_blocks=len(hashes),
            announce=False,
            may_wait=False,
        )
        if not isinstance(begun, Begun):
            raise CannotMeasure(f"the pool answered {begun}")
        return begun

    def seconds_a_block(self) -> float:
        """Median over some random chains."""

        def attach_and_release(hashes: Sequence[ChainHash]) -> float:
            return seconds(lambda: self.pool.release(SESSION, blocks=self.begin(hashes, CHAIN_BLOCKS).blocks))

        chains = [unpack_hashes(self._choose.choice(self.packed_chains)) for _ in range(CHAINS_A_ROUND)]
        return statistics.median(map(attach_and_release, chains)) / CHAIN_BLOCKS


@contextmanager
def _calm_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    calm_garbage_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _measure(run: Run) -> list[Row]:
    pools = {}
    for size in SIZES:
        run.step(f"making {size:,} blocks")
        pools[size] = FullPool(size)
    with _calm_collector():
        medians = interleaved(run, {f"{size:,} blocks": pool.seconds_a_block for size, pool in pools.items()})
    each = [median * 1e9 for median in medians.values()]
    note = ", ".join(f"{name}: {median * 1e9:.0f}" for name, median in medians.items())
    return [TARGET.row(each[-1], each[0], note=note)]


GROUP = Group((TARGET,), _measure)
