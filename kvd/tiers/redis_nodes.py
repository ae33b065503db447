"""One Redis or all nodes of a cluster: sends each key's work to the node that holds it.

A node that is in trouble costs only its own keys: it has a breaker of its own, and the call fails as a whole only when
every node it needed did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from kvd.errors import TierUnavailable
from kvd.tiers.breaker import CircuitBreaker
from kvd.tiers.codecs import Codec
from kvd.tiers.redis_bulk import BulkPool, ReadJob, WriteJob, ask, fetch, store
from kvd.tiers.redis_connection import RedisControl, ServerInfo
from kvd.tiers.redis_errors import error_of_reply
from kvd.tiers.redis_url import Node, RedisAddress
from kvd.tiers.resp_connection import ErrorReply, Reply

_Label = TypeVar("_Label", bound=Hashable)
_Item = TypeVar("_Item")
_Job = TypeVar("_Job", ReadJob, WriteJob)

Keyed = tuple[bytes, bytes]
"""A key, and the encoded command about it."""


class RedisNodes:
    """Thread-safe. Raises only `TierError`s."""

    def __init__(
        self,
        address: RedisAddress,
        *,
        control_timeout_s: float,
        connect_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.control = RedisControl(address, timeout_s=control_timeout_s, connect_timeout_s=connect_timeout_s)
        self.server: ServerInfo | None = None
        """Who answered at the last check; None before the first and after a failure."""
        self._pool = BulkPool(address, connect_timeout_s=connect_timeout_s)
        self._is_cluster = address.cluster
        self._control_timeout_s = control_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._breakers: dict[Node, CircuitBreaker] = {}
        self._topology_stale = False

    def ensure_checked(self) -> None:
        """Make sure that it is a Redis we can use; asks only when that is not known."""
        if self.server is None:
            self.server = self.control.check()
        if self._topology_stale:
            self._topology_stale = False
            self.control.refresh_topology()

    def distrust(self) -> None:
        """Something failed: look again who is there before the next call."""
        self.server = None
        self._pool.drop_idle()

    def close(self) -> None:
        """Idempotent."""
        self._pool.close()
        self.control.close()

    def ask_each(self, commands: Mapping[_Label, Keyed]) -> dict[_Label, Reply]:
        """Small commands, one round trip per node. A command that failed gives None; what a node in trouble
        was asked is left out.
        """
        replies: dict[_Label, Reply] = {}
        moved: list[_Label] = []

        def ask_node(node: Node, labels: list[_Label]) -> None:
            with self._pool.connection(node, timeout_s=self._control_timeout_s) as connection:
                found = ask(connection, [commands[label][1] for label in labels])
            for label, reply in zip(labels, found, strict=True):
                if isinstance(reply, ErrorReply) and reply.text.startswith("MOVED "):
                    moved.append(label)
                else:
                    replies[label] = self._usable(reply)

        self._on_each_node(list(commands), lambda label: commands[label][0], ask_node)
        if moved:
            self.control.refresh_topology()
            self._on_each_node(list(moved), lambda label: commands[label][0], ask_node)
        return replies

    def fetch(self, jobs: Sequence[ReadJob], *, ttl_s: int, timeout_s: float, tail: Sequence[Keyed]) -> list[Reply]:
        """Run read jobs; then, after all values are read, the `tail` commands, whose answers are returned."""

        def fetch_node(node: Node, some: list[ReadJob], tail: list[bytes]) -> list[Reply]:
            return fetch(self._pool, node, some, ttl_s=ttl_s, timeout_s=timeout_s, tail=tail)

        return self._transfer(jobs, tail, fetch_node)

    def store(
        self, jobs: Sequence[WriteJob], *, codec: Codec, ttl_s: int, timeout_s: float, tail: Sequence[Keyed]
    ) -> list[Reply]:
        """Run write jobs; then, after all values are stored, the `tail` commands, whose answers are returned."""

        def store_node(node: Node, some: list[WriteJob], tail: list[bytes]) -> list[Reply]:
            return store(self._pool, node, some, codec=codec, ttl_s=ttl_s, timeout_s=timeout_s, tail=tail)

        return self._transfer(jobs, tail, store_node)

    def _transfer(
        self,
        jobs: Sequence[_Job],
        tail: Sequence[Keyed],
        action: Callable[[Node, list[_Job], list[bytes]], list[Reply]],
    ) -> list[Reply]:
        if not jobs and not tail:
            return []
        if not self._is_cluster:
            # The tail travels in the same pipeline.
            replies = action(self.control.node_of(b""), list(jobs), [one for _, one in tail])
            return [self._usable(reply) for reply in replies]
        self._on_each_node(jobs, _key_of, lambda node, some: action(node, some, []))
        moved = [job for job in jobs if job.outcome is not None and job.outcome.cause == "slot-moved"]
        if moved:
            self.control.refresh_topology()
            self._on_each_node(moved, _key_of, lambda node, some: action(node, some, []))
        answers = self.ask_each(dict(enumerate(tail)))
        if len(answers) < len(tail):
            raise TierUnavailable("a node that holds a generation does not answer", cause="node-down")
        return [answers[index] for index in range(len(tail))]

    def _on_each_node(
        self,
        items: Sequence[_Item],
        key_of: Callable[[_Item], bytes],
        action: Callable[[Node, list[_Item]], object],
    ) -> None:
        groups: dict[Node, list[_Item]] = {}
        for item in items:
            groups.setdefault(self.control.node_of(key_of(item)), []).append(item)
        if len(groups) == 1:
            for node, group in groups.items():
                action(node, group)
            return
        errors: list[TierUnavailable] = []
        for node, group in groups.items():
            try:
                with self._breaker_of(node).guard():
                    action(node, group)
            except TierUnavailable as error:
                errors.append(error)
                self._topology_stale = True  # a replica may have taken over
        if errors and len(errors) == len(groups):
            raise errors[0]

    def _breaker_of(self, node: Node) -> CircuitBreaker:
        with self._lock:
            return self._breakers.setdefault(node, CircuitBreaker(clock=self._clock))

    def _usable(self, reply: Reply) -> Reply:
        """Errors that concern the whole server are raised; one about the key itself reads as "not there"."""
        if not isinstance(reply, ErrorReply):
            return reply
        error = error_of_reply(self.control.where, reply.text)
        if isinstance(error, TierUnavailable):
            raise error
        return None


def _key_of(job: ReadJob | WriteJob) -> bytes:
    return job.redis_key
