"""kill -9 of a client, and of the owner."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpu_checks import actions
from gpu_checks.bench import MIB, Bench
from gpu_checks.codes import error_row
from gpu_checks.table import Row, Verdict, expect

PATTERN = b"still there"
SETTLE_S = 10.0


def check(bench: Bench) -> Iterator[Row]:
    """What survives, and when memory comes back."""
    yield from _client_dies(bench)
    yield from _owner_dies(bench)


def _client_dies(bench: Bench) -> Iterator[Row]:
    victim, other = bench.peer(), bench.peer()
    with bench.segment(8 * MIB) as (segment, export):
        for peer in (victim, other):
            peer.call(actions.attach, [export])
        victim.call(actions.poke, export, MIB, PATTERN)
        victim.kill()
        back = bytearray(len(PATTERN))
        segment.read(MIB, back)
        yield expect("deaths", "kill -9 of a client: the owner's memory is whole", bytes(back) == PATTERN)
        seen = other.call(actions.peek, export, MIB, len(PATTERN))
        yield expect("deaths", "kill -9 of a client: another client's too", seen == PATTERN)
        other.call(actions.detach)
    other.kill()


def _owner_dies(bench: Bench) -> Iterator[Row]:
    owner, client, late = bench.peer(), bench.peer(), bench.peer()
    # Large beside what a context takes and gives back, which is measured and left out.
    nbytes = min(1 << 30, bench.device.total_nbytes // 16 // (2 * MIB) * (2 * MIB))
    for peer in (client, late):
        peer.call(actions.warm, bench.device.uuid)
    without_nbytes = bench.context.memory()[0]
    owner.call(actions.warm, bench.device.uuid)
    context_nbytes = without_nbytes - bench.context.memory()[0]
    export = owner.call(actions.own, bench.device.uuid, nbytes, PATTERN)
    client.call(actions.attach, [export])
    held_nbytes = bench.context.memory()[0]

    def is_back(bound_s: float) -> bool:
        deadline_s = time.monotonic() + bound_s
        while True:
            if bench.context.memory()[0] - held_nbytes - context_nbytes > nbytes // 2:
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)

    owner.kill()
    seen = client.call(actions.peek, export, 0, len(PATTERN))
    yield expect("deaths", "kill -9 of the owner: a mapped client reads on", seen == PATTERN)
    code = late.call(actions.raw_open, bench.device.uuid, export.handle)
    yield error_row("open of a dead owner's handle", code, "400", "deaths")
    word = "came back at once" if is_back(1.0) else "is charged to the client"
    yield Row("deaths", "its memory while a client maps it", Verdict.TOLD, word)
    client.call(actions.detach)
    found = f"{(bench.context.memory()[0] - held_nbytes) // MIB} MiB back of {nbytes // MIB}"
    yield expect("deaths", "its memory after the client let go comes back", is_back(SETTLE_S), found)
    for peer in (client, late):
        peer.kill()
