"""Two processes that count the cards differently map one segment."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpu_checks import actions
from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, expect

OFFSETS = (0, 2 * MIB - 7, 5 * MIB + 4096, 8 * MIB - 15)
"""The first and last bytes, across a border of 2 MiB, anywhere."""


def check(bench: Bench) -> Iterator[Row]:
    """Patterns at offsets, in both directions, under each way to name the card."""
    others = [device.uuid for device in bench.driver.devices if device.uuid != bench.device.uuid]
    visible = {
        "by number": _number(bench.device.ordinal),
        "by UUID": bench.device.uuid,
        "last in the list": ",".join([*others, bench.device.uuid]),
    }
    with bench.segment(8 * MIB) as (segment, export):
        for offset in OFFSETS:
            segment.write(offset, bytearray(_pattern(offset)))
        for how, value in visible.items():
            peer = bench.peer(CUDA_VISIBLE_DEVICES=value)
            number = peer.call(actions.cards).index(bench.device.uuid)
            peer.call(actions.attach, [export])
            right = all(peer.call(actions.peek, export, offset, 15) == _pattern(offset) for offset in OFFSETS)
            yield expect("sharing", f"bytes at every offset, card named {how}", right, f"cuda:{number} there")
            peer.call(actions.poke, export, 3 * MIB, how.encode())
            back = bytearray(len(how))
            segment.read(3 * MIB, back)
            yield expect("sharing", f"what the client writes arrives, card named {how}", back == how.encode())
            peer.call(actions.detach)
            peer.kill()


def _pattern(offset: int) -> bytes:
    return f"{offset:015d}".encode()


def _number(ordinal: int) -> str:
    """What this process calls cuda:N, in the words of the machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(ordinal) if visible is None else visible.split(",")[ordinal]
