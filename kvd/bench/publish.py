"""publish_64x2mib and publish_64x2mib_fresh.

publish_64x2mib. The retained arena. Timed: copying 128 MiB into reserved blocks whose pages this process has written
before (an engine that keeps its sequence), naming the tokens and sealing the 64 blocks.

publish_64x2mib_fresh. Timed: reserving 64 blocks and mapping them too, with the page table still empty.

Limit of both: memcpy of the same 128 MiB into resident memory of this process. Throughputs; ratio: value / limit.
"""

from __future__ import annotations

import itertools
import time

import kvd_client
from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved, seconds
from kvd.bench.shapes import MIB, SEGMENT_NBYTES, TWO_MIB, prompt

NUM_TOKENS = 64 * TWO_MIB.block_tokens
NBYTES = 64 * TWO_MIB.block_nbytes

RETAINED = Target(name="publish_64x2mib", unit="GiB/s", text=">= 0.9x memcpy", at_least=0.9)
FRESH = Target(name="publish_64x2mib_fresh", unit="GiB/s", text=">= 0.6x memcpy", at_least=0.6)


def write(seq: kvd_client.Sequence, source: memoryview) -> None:
    """Copies the source over all tokens of the sequence."""
    target = seq.buffer(0, NUM_TOKENS)
    target[:] = source
    target.release()


def seal(seq: kvd_client.Sequence) -> None:
    """Publishes what was written."""
    seq.advance(NUM_TOKENS)
    if seq.commit() != NUM_TOKENS:
        raise CannotMeasure("not every block was sealed")


class Publisher:
    """Publishes the same bytes again and again, under other tokens each time."""

    def __init__(self, client: kvd_client.Client, source: memoryview) -> None:
        self._cache = client.cache(model="bench", layout=TWO_MIB)
        self._source = source
        self._seeds = itertools.count(100)

    def retained_s(self) -> float:
        """Into pages written before."""
        ids = prompt(next(self._seeds), NUM_TOKENS)
        with self._cache.allocate_sequence(NUM_TOKENS) as seq:
            write(seq, self._source)
            start = time.perf_counter()
            write(seq, self._source)
            seq.add_tokens(ids)
            seal(seq)
            return time.perf_counter() - start

    def fresh_s(self) -> float:
        """Into pages mapped only now."""
        ids = prompt(next(self._seeds), NUM_TOKENS)
        start = time.perf_counter()
        with self._cache.sequence(ids, max_tokens=NUM_TOKENS) as seq:
            write(seq, self._source)
            seal(seq)
            return time.perf_counter() - start


def _measure(run: Run) -> list[Row]:
    source = memoryview(bytearray(b"\1" * NBYTES))
    own = memoryview(bytearray(b"\2" * NBYTES))

    def memcpy() -> None:
        own[:] = source

    run.step("starting a daemon")
    with PrivateDaemon(memory_budget=1024 * MIB, memory_segment=SEGMENT_NBYTES) as daemon, daemon.connect() as client:
        publisher = Publisher(client, source)
        medians = interleaved(
            run,
            {"retained": publisher.retained_s, "fresh": publisher.fresh_s, "memcpy": lambda: seconds(memcpy)},
        )
    retained, fresh, limit = (NBYTES / (1 << 30) / medians[name] for name in ("retained", "fresh", "memcpy"))
    return [RETAINED.row(retained, limit), FRESH.row(fresh, limit)]


GROUP = Group((RETAINED, FRESH), _measure)
