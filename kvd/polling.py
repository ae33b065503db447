"""Waiting until descriptors can be read, whatever their numbers: select(2) ends at 1,023. Shared with the clients."""

from __future__ import annotations

import select
from collections.abc import Collection


def readable(*descriptors: int, bound_s: float | None = None) -> Collection[int]:
    """Those that can be read, or whose other end has closed; empty after `bound_s` seconds (None: no bound).

    Raises `ValueError` for a negative number, which is what a closed socket has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if bound_s is None else bound_s * 1000)]
