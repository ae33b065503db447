"""The sans-IO core's shape: a verb is a generator that yields requests and is sent the replies.

A transport drives it: it sends each request, and either sends the reply into the generator or throws what a `Failed`
stands for. The same verbs serve the blocking and the asyncio client.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import SupportsIndex, TypeVar

from kvd.errors import ConnectionFailed, from_wire
from kvd.protocol.replies import Failed, Reply
from kvd.protocol.requests import Begin, Request, Seal
from kvd_client.options import LONGEST_DEFAULT_WAIT_S

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

Verb = Generator[Request, Reply, T]
"""A verb that ends with a `T`."""

Tokens = Iterable[SupportsIndex]
"""Token ids.

A list, tuple, one-dimensional numpy array or torch tensor of integers (see `kvd.hashing.encode_tokens`).
"""


def expect(reply: Reply, kind: type[R]) -> R:
    """The reply as what was asked for. Raises `ConnectionFailed` when the daemon answers something else."""
    if type(reply) is not kind:
        raise ConnectionFailed(f"the daemon answered {type(reply).__name__} where {kind.__name__} was due")
    return reply


def feed(verb: Verb[T], reply: Reply) -> Request:
    """Hands a verb its reply, or throws what a `Failed` stands for; the next request.

    `StopIteration` holds the result.
    """
    if type(reply) is Failed:
        return verb.throw(from_wire(reply.code, reply.message))
    return verb.send(reply)


def bound_s(request: Request, timeout_s: float) -> float:
    """How long an answer may take: the wait the request asks for, and the caller's margin."""
    if type(request) is not Begin:
        return timeout_s
    return timeout_s + (LONGEST_DEFAULT_WAIT_S if request.wait_s is None else request.wait_s)


def leaves_unknown_state(request: Request) -> bool:
    """Whether nobody knows what the session holds when the reply to `request` is never read."""
    return isinstance(request, Seal)
