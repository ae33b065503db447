"""Requests over one DEALER in an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from kvd.errors import ConnectionFailed, KvdError, RequestTimeout
from kvd.protocol import wire
from kvd.protocol.replies import Reply
from kvd.protocol.requests import Request
from kvd_client.session.link import Link
from kvd_client.transport import dealer


class AsyncChannel:
    """Sends requests of one link and awaits the replies. Of one event loop; only `post` may be called elsewhere."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._dealer, link)
        self._credits = asyncio.Semaphore(link.credits)
        self._waiters: dict[int, asyncio.Future[Reply]] = {}
        self._posted: deque[bytes] = deque()
        self._closed = False
        self._session_fd = link.session.fileno()
        self._loop.add_reader(self._session_fd, link.drain_session)
        link.post = self.post
        link.when_lost = self._on_lost
        self._receiver = asyncio.create_task(self._receive(), name="kvd replies")

    async def exchange(self, request: Request, bound_s: float) -> Reply:
        """The reply to a request. Raises `RequestTimeout` (the link is lost then), or why the link is lost."""
        async with self._credits:
            self._link.require_alive()
            self._send_posted()
            waiter: asyncio.Future[Reply] = self._loop.create_future()
            self._waiters[request.request_id] = waiter
            try:
                async with asyncio.timeout(bound_s):
                    # Not awaited: without a peer a send never ends, and then it is the waiter that is told why.
                    self._send(wire.encode(request))
                    return await waiter
            except KvdError:
                raise  # why the link was lost, which may be a time-out of another request
            except TimeoutError as error:
                kind = type(request).__name__
                late = RequestTimeout(f"no answer to {kind} within {bound_s} s; the session was closed")
                self._link.lose(late)
                raise late from error
            finally:
                self._waiters.pop(request.request_id, None)

    def post(self, request: Request) -> None:
        """Sends a request that has no reply. From any thread, from finalizers; never blocks and never raises."""
        self._posted.append(wire.encode(request))
        try:
            self._loop.call_soon_threadsafe(self._send_posted)
        except RuntimeError:
            # The loop was closed, and with it the only way to speak; the end of the session gives everything back.
            self._posted.clear()

    def _send_posted(self) -> None:
        while self._posted and not self._closed:
            self._send(self._posted.popleft())

    def _send(self, frame: bytes) -> None:
        asyncio.ensure_future(self._dealer.send(frame)).add_done_callback(_look_at)

    async def _receive(self) -> None:
        try:
            while True:
                self._dispatch(wire.decode_reply(await self._dealer.recv()))
        except KvdError as error:
            # Whose reply it was is unknown, and so is what is held.
            self._link.lose(
                ConnectionFailed(f"the daemon's answer is not understood, so the session was closed: {error}")
            )

    def _dispatch(self, reply: Reply) -> None:
        landing = self._link.landings.pop(reply.request_id, None)
        if landing is not None:
            landing.receive(reply)
        waiter = self._waiters.get(reply.request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def stop_reading(self) -> None:
        """The session is over, or about to be. On the loop's thread. Idempotent."""
        # Once only: by the second time the number may be the session socket of the next link, in the same loop.
        fd, self._session_fd = self._session_fd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)

    def _on_lost(self) -> None:
        if threading.get_ident() == self._thread_id:
            self._tell_waiters()
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits
            self._loop.call_soon_threadsafe(self._tell_waiters)

    def _tell_waiters(self) -> None:
        self.stop_reading()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(self._link.lost or ConnectionFailed("the session is over"))

    async def close(self) -> None:
        """Closes the socket. The link is lost by then. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.stop_reading()
        self._receiver.cancel()
        await asyncio.wait([self._receiver])
        self._dealer.close()
        self._context.term()


def _look_at(sent: asyncio.Future[Any]) -> None:
    """Nobody waits for a send by itself; its failure means that the session is ending, which others find out."""
    if not sent.cancelled():
        sent.exception()
