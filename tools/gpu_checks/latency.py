"""How long opening and closing take, and whether two hundred rounds of it leave anything behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpu_checks import actions
from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, Verdict, expect

NUM_SEGMENTS = 64
NUM_CYCLES = 200


def check(bench: Bench) -> Iterator[Row]:
    """1 and 64 segments of 2 MiB; then attach and detach, again and again."""
    peer = bench.peer()
    with contextlib.ExitStack() as stack:
        exports = [stack.enter_context(bench.segment(2 * MIB))[1] for _ in range(NUM_SEGMENTS)]
        peer.call(actions.attach, exports[:1])
        peer.call(actions.detach)
        for count in (1, NUM_SEGMENTS):
            opened_s = peer.call(actions.attach, exports[:count])
            closed_s = peer.call(actions.detach)
            each = f"{opened_s / count * 1e3:.2f} ms to open, {closed_s / count * 1e3:.2f} ms to close"
            yield Row("latency", f"{count} segment{'s' if count > 1 else ''}, each", Verdict.TOLD, each)
        before = (bench.context.memory()[0], peer.call(actions.resources))
        for _ in range(NUM_CYCLES):
            peer.call(actions.attach, exports[:1])
            peer.call(actions.detach)
        after = (bench.context.memory()[0], peer.call(actions.resources))
        found = f"{(before[0] - after[0]) // 1024} KiB of the card, {after[1] - before[1]} descriptors more"
        # Others use the card meanwhile; a leak would be some 400 MiB.
        tight = abs(before[0] - after[0]) < NUM_CYCLES * MIB and before[1] == after[1]
        yield expect("latency", f"{NUM_CYCLES} times attach and detach leak nothing", tight, found)
    peer.kill()
