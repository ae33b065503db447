"""`AsyncRunner`: drives the same verbs as `blocking.Runner`, in an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvd.errors import ClientClosed, DaemonRestarted, KvdError
from kvd_client.core import verbs
from kvd_client.core.sequence_core import SequenceCore
from kvd_client.core.verb import Verb, bound_s, feed
from kvd_client.options import Options
from kvd_client.session import fork
from kvd_client.session.link import Link
from kvd_client.transport.aio_channel import AsyncChannel

T = TypeVar("T")


class AsyncRunner:
    """What the asyncio client, cache and sequence share. Of one event loop."""

    def __init__(self, options: Options) -> None:
        """`connect` makes the session."""
        self._options = options
        self._reconnecting = asyncio.Lock()
        self._closed = False
        self._background: set[asyncio.Task[Any]] = set()
        self._current: tuple[Link, AsyncChannel]

    @property
    def link(self) -> Link:
        """The session of now; another one after a restart of the daemon."""
        return self._current[0]

    async def connect(self) -> None:
        """Connects. Raises `ConnectionFailed` or one of its kinds."""
        link = await asyncio.to_thread(Link, self._options)
        channel = AsyncChannel(link)
        fork.watch(link)
        self._current = link, channel

    async def run(self, make_verb: Callable[[Link], Verb[T]]) -> T:
        """Drives a verb that needs nothing held before; connects again first where the old session held nothing."""
        return await self.see_through(self._run(make_verb))

    async def drive(self, verb: Verb[T]) -> T:
        """Drives a verb of an open sequence, within `see_through`."""
        return await self._drive(self._current[1], verb)

    async def see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """A verb is never cut short, or nobody would know what is held: a cancelled caller leaves it to finish alone.

        What it then brings is given back.
        """
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_give_back)
            raise

    async def _run(self, make_verb: Callable[[Link], Verb[T]]) -> T:
        link, channel = self._current
        if link.lost is None:
            try:
                return await self._drive(channel, make_verb(link))
            except DaemonRestarted:
                if not link.can_be_replaced:
                    raise
        await self._reconnect(link)
        link, channel = self._current
        try:
            return await self._drive(channel, make_verb(link))
        except DaemonRestarted as error:
            if not link.can_be_replaced:
                raise
            raise link.gone_again() from error

    async def _drive(self, channel: AsyncChannel, verb: Verb[T]) -> T:
        timeout_s = self._options.timeout_s
        try:
            request = next(verb)
            while True:
                request = feed(verb, await channel.exchange(request, bound_s(request, timeout_s)))
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            # Interrupted between two requests, it puts right at once what it has begun.
            verb.close()
            raise

    async def _reconnect(self, lost: Link) -> None:
        async with self._reconnecting:
            if self._closed:
                raise ClientClosed("the client was closed")
            link, channel = self._current
            if link is not lost:
                return  # another task was first
            if not lost.can_be_replaced:
                lost.require_alive()
            # The number of its session socket may be the next one's, which the same loop is to read.
            channel.stop_reading()
            await self.connect()
            await channel.close()
            lost.close_when_unmapped()

    async def close(self) -> None:
        """See `Client.close`."""
        if self.link.is_forked:
            return
        # A new session that is under way is closed too.
        async with self._reconnecting:
            if self._closed:
                return
            self._closed = True
        link, channel = self._current
        try:
            if not link.close_sequences():
                await self._drive(channel, verbs.settle(link))
        except KvdError:
            # Whatever ended the session gave everything back, and closing asks for no more.
            if link.lost is None:
                raise
        finally:
            link.close_when_unmapped()
            if self._background:
                # Abandoned verbs end with the link.
                await asyncio.wait(set(self._background))
            await channel.close()
            if link.is_on_card:
                await asyncio.to_thread(link.await_device_memory)


def _give_back(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        result = task.result()
        if isinstance(result, SequenceCore):
            result.close()
