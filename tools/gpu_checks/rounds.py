"""Write, wait, tell, read: a thousand times, with checksums."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from gpu_checks import actions
from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, expect
from kvd.memory.device_copies import CopyEngine

NUM_ROUNDS = 1000
BLOCK_NBYTES = 64 << 10
SEED = 20


def check(bench: Bench) -> Iterator[Row]:
    """The owner writes on a stream from page-locked memory; the client reads as soon as it is told."""
    pick = random.Random(SEED)  # noqa: S311 - offsets and bytes, no secrets
    num_wrong = 0
    engine = CopyEngine(bench.context, num_lanes=1, lane_nbytes=BLOCK_NBYTES)
    peer = bench.peer()
    with bench.segment(8 * MIB) as (segment, export):
        peer.call(actions.attach, [export])
        for _ in range(NUM_ROUNDS):
            offset = pick.randrange(0, segment.nbytes - BLOCK_NBYTES)
            data = pick.randbytes(BLOCK_NBYTES)
            with engine.lane() as lane:
                staged = lane.stage(BLOCK_NBYTES)
                staged.data[:] = data
                lane.upload(segment, offset, staged)
            num_wrong += peer.call(actions.checksum, export, offset, BLOCK_NBYTES) != zlib.crc32(data)
        peer.call(actions.detach)
    engine.close()
    peer.kill()
    yield expect("rounds", f"{NUM_ROUNDS} of write, synchronise, message, read", not num_wrong, f"{num_wrong} wrong")
