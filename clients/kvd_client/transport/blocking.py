"""`Runner`: drives verbs by blocking, and connects again where nothing is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvd.errors import ClientClosed, DaemonRestarted, KvdError
from kvd_client.core import verbs
from kvd_client.core.verb import Verb, bound_s, feed
from kvd_client.options import Options
from kvd_client.session import fork
from kvd_client.session.link import Link
from kvd_client.transport.channel import BlockingChannel

T = TypeVar("T")


class Runner:
    """What `Client`, `Cache` and `Sequence` share: the options, the current link and its channel."""

    def __init__(self, options: Options) -> None:
        """Connects. Raises `ConnectionFailed` or one of its kinds."""
        self._options = options
        self._reconnecting = threading.Lock()
        self._closed = False
        self._current = self._connect()

    @property
    def link(self) -> Link:
        """The session of now; another one after a restart of the daemon."""
        return self._current[0]

    def _connect(self) -> tuple[Link, BlockingChannel]:
        link = Link(self._options)
        channel = BlockingChannel(link)
        fork.watch(link)
        return link, channel

    def run(self, make_verb: Callable[[Link], Verb[T]]) -> T:
        """Drives a verb that needs nothing held before; connects again first where the old session held nothing."""
        # Taken together: another thread may be connecting again, and a link speaks through its own channel only.
        link, channel = self._current
        if link.lost is None:
            try:
                return self._drive(channel, make_verb(link))
            except DaemonRestarted:
                if not link.can_be_replaced:
                    raise
        self._reconnect(link)
        link, channel = self._current
        try:
            return self._drive(channel, make_verb(link))
        except DaemonRestarted as error:
            if not link.can_be_replaced:
                raise
            raise link.gone_again() from error

    def drive(self, verb: Verb[T]) -> T:
        """Drives a verb of an open sequence."""
        return self._drive(self._current[1], verb)

    def _drive(self, channel: BlockingChannel, verb: Verb[T]) -> T:
        timeout_s = self._options.timeout_s
        try:
            request = next(verb)
            while True:
                request = feed(verb, channel.exchange(request, bound_s(request, timeout_s)))
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            # Interrupted between two requests, it puts right at once what it has begun.
            verb.close()
            raise

    def _reconnect(self, lost: Link) -> None:
        if lost.is_forked:
            # Whoever held the lock when the process forked is not there to let go of it.
            lost.require_alive()
        with self._reconnecting:
            if self._closed:
                raise ClientClosed("the client was closed")
            link, channel = self._current
            if link is not lost:
                return  # another thread was first
            if not lost.can_be_replaced:
                lost.require_alive()
            self._current = self._connect()
            channel.close()
            lost.close_when_unmapped()

    def close(self) -> None:
        """See `Client.close`."""
        if self.link.is_forked:
            # Nothing is ours here; and whoever held the lock when the process forked is not there to let go of it.
            return
        with self._reconnecting:
            if self._closed:
                return
            self._closed = True
        link, channel = self._current
        try:
            if not link.close_sequences():
                # Blocks that no view keeps have gone back when this returns; those under live views follow.
                self._drive(channel, verbs.settle(link))
        except KvdError:
            # Whatever ended the session gave everything back, and closing asks for no more.
            if link.lost is None:
                raise
        finally:
            link.close_when_unmapped()
            channel.close()
            link.await_device_memory()
