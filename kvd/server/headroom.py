"""Keeps descriptors free for libzmq, which aborts the process when it accepts a connection and none is left.

A new descriptor gets the lowest free number, so its number tells how many are in use. What we open ourselves may go up
to `OWN_RESERVE` below the limit; ZeroMQ connections up to `ZMQ_RESERVE` below it are then cut again at once.
"""

from __future__ import annotations

import resource

OWN_RESERVE = 512
ZMQ_RESERVE = 256


def is_scarce(descriptor: int, reserve: int) -> bool:
    """Whether the number of a fresh descriptor says that no more than `reserve` are left, or half of a low limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptor >= soft - min(reserve, soft // 4 * reserve // OWN_RESERVE)
