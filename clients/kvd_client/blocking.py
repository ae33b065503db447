"""`Runner`: drives verbs by blocking, and connects again where nothing is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvd.errors import ClientClosed, DaemonRestarted
from kvd_client import fork, verbs
from kvd_client.channel import BlockingChannel
from kvd_client.link import Link
from kvd_client.options import Options
from kvd_client.verb import Verb, bound_s, feed

T = TypeVar("T")


class Runner:
    """What `Client`, `Cache` and `Sequence` share: the options, the current link and its channel."""

    def __init__(self, options: Options) -> None:
        """Connects. Raises `ConnectionFailed` or one of its kinds."""
        self._options = options
        self._reconnecting = threading.Lock()
        self._closed = False
        self.link, self._channel = self._connect()

    def _connect(self) -> tuple[Link, BlockingChannel]:
        link = Link(self._options)
        channel = BlockingChannel(link)
        fork.watch(link)
        return link, channel

    def run(self, make_verb: Callable[[Link], Verb[T]]) -> T:
        """Drives a verb that needs nothing held before; connects again first where the old session held nothing."""
        link, channel = self.link, self._channel
        if link.lost is None:
            try:
                return self._drive(channel, make_verb(link))
            except DaemonRestarted:
                if not link.can_be_replaced:
                    raise
        self._reconnect(link)
        return self._drive(self._channel, make_verb(self.link))

    def drive(self, verb: Verb[T]) -> T:
        """Drives a verb of an open sequence."""
        return self._drive(self._channel, verb)

    def _drive(self, channel: BlockingChannel, verb: Verb[T]) -> T:
        timeout_s = self._options.timeout_s
        try:
            request = next(verb)
            while True:
                request = feed(verb, channel.exchange(request, bound_s(request, timeout_s)))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _reconnect(self, lost: Link) -> None:
        with self._reconnecting:
            if self._closed:
                raise ClientClosed("the client was closed")
            if self.link is not lost:
                return  # another thread was first
            if not lost.can_be_replaced:
                lost.require_alive()
            link, channel = self._connect()
            self._channel.close()
            lost.close_when_unmapped()
            self.link, self._channel = link, channel

    def close(self) -> None:
        """See `Client.close`."""
        with self._reconnecting:
            if self._closed or self.link.is_forked:
                return
            self._closed = True
        if not self.link.close_sequences():
            # Blocks that no view keeps go back before the socket closes; those under live views follow when they die.
            self._drive(self._channel, verbs.settle(self.link))
        self.link.close_when_unmapped()
        self._channel.close()
