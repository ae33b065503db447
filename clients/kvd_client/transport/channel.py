"""Blocking requests over one DEALER, from any number of threads.

A ZeroMQ socket belongs to one thread at a time. Of the threads that wait, one is the *leader*: it alone sends, polls
and receives, hands each reply to the thread it is for, and passes the lead on when its own has come. The others wait
on a lock each and leave their frames in a queue; an eventfd tells the leader. With one thread this is a send, a poll
and a receive.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import zmq

from kvd.errors import ConnectionFailed, RequestTimeout
from kvd.protocol import wire
from kvd.protocol.replies import Reply
from kvd.protocol.requests import Request
from kvd_client.core.verb import leaves_unknown_state
from kvd_client.session.link import Link
from kvd_client.transport import dealer


class _Waiter:
    """A request under way, and the thread that waits for its reply."""

    __slots__ = ("abandoned", "leads", "reply", "request", "wake")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.reply: Reply | None = None
        self.leads = False
        self.abandoned = False  # its thread was interrupted and waits no more
        self.wake: threading.Lock | None = None  # a follower's: held until there is a reply, or the lead


class BlockingChannel:
    """Sends requests of one link and waits for the replies. Every method may be called from any thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._dealer, link)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._dealer, link.session.fileno(), self._wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._lock = threading.Lock()
        """Protects the waiters and who leads. Held for moments; finalizers only ever try it."""
        self._leaderless = threading.Condition(self._lock)
        self._waiters: dict[int, _Waiter] = {}
        self._has_leader = False
        self._outgoing: deque[tuple[bytes, bool]] = deque()
        """Frames, and whether each is answered.

        Appended by anyone, taken by the leader, or under the lock without one.
        """
        self._num_in_flight = 0
        self._is_transferring = False
        """From before a frame is handed to ZeroMQ, or taken from it, until that is accounted for."""
        self._closed = False
        link.post = self.post
        link.when_lost = self._poke
        link.when_forked = self._forget_in_child

    def exchange(self, request: Request, bound_s: float) -> Reply:
        """The reply to a request. Raises `RequestTimeout` (the link is lost then), or why the link is lost."""
        waiter = _Waiter(request)
        deadline = time.monotonic() + bound_s
        frame = wire.encode(request)
        try:
            self._enter(waiter, frame)
            if not waiter.leads:
                self._follow(waiter, deadline)
            if waiter.leads:
                self._lead(waiter, deadline)
        except BaseException:
            self._abandon(waiter)
            raise
        finally:
            if waiter.leads:
                try:
                    self._pass_lead_on(waiter)
                except BaseException:
                    # Interrupted: whoever is due to lead must not be left waiting.
                    self._pass_lead_on(waiter)
                    raise
        if waiter.reply is None:
            self._link.require_alive()
            raise ConnectionFailed("the daemon's reply was lost")
        return waiter.reply

    def post(self, request: Request) -> None:
        """Sends a request that has no reply. Never blocks and never raises: fit for finalizers."""
        self._send_later(request)
        if self._has_leader:
            self._poke()
        else:
            self._flush_idle()

    def _send_later(self, request: Request) -> None:
        self._outgoing.append((wire.encode(request), False))

    def _enter(self, waiter: _Waiter, frame: bytes) -> None:
        with self._lock:
            self._link.require_alive()
            if self._is_transferring and not self._has_leader:
                # A post was interrupted there.
                self._lose_interrupted()
                self._link.require_alive()
            self._waiters[waiter.request.request_id] = waiter
            self._outgoing.append((frame, True))
            if not self._has_leader:
                self._has_leader = waiter.leads = True
                return
            waiter.wake = threading.Lock()
            waiter.wake.acquire()
        self._poke()

    def _follow(self, waiter: _Waiter, deadline: float) -> None:
        """Waits until there is a reply, the lead, or no link any more."""
        wake = waiter.wake
        if wake is not None and not wake.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._time_out(waiter)

    def _lead(self, waiter: _Waiter, deadline: float) -> None:
        while True:
            self._send_outgoing()
            if waiter.reply is not None or self._link.lost is not None:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._time_out(waiter)
                return
            for source, _event in self._poller.poll(int(left_s * 1000) + 1):
                if source is self._dealer:
                    self._receive(waiter)
                elif source == self._wake_fd:
                    self._drain_pokes()
                else:
                    self._link.drain_session()

    def _time_out(self, waiter: _Waiter) -> None:
        kind = type(waiter.request).__name__
        self._link.lose(RequestTimeout(f"no answer to {kind} within its bound; the session was closed"))

    def _send_outgoing(self) -> None:
        """Sends what is queued, as far as the session's credits go."""
        while self._outgoing:
            frame, is_answered = self._outgoing[0]
            if is_answered and self._num_in_flight >= self._link.credits:
                return
            self._is_transferring = True
            try:
                self._dealer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._is_transferring = False
                return
            self._outgoing.popleft()
            self._num_in_flight += is_answered
            self._is_transferring = False

    def _receive(self, waiter: _Waiter) -> None:
        """Hands out what has come, up to the leader's own reply: the rest is the next leader's."""
        while waiter.reply is None:
            self._is_transferring = True
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._is_transferring = False
                return
            self._dispatch(wire.decode_reply(frame))
            self._is_transferring = False

    def _dispatch(self, reply: Reply) -> None:
        with self._lock:
            waiter = self._waiters.pop(reply.request_id, None)
            if waiter is None:
                return
            self._num_in_flight -= 1
        landing = self._link.landings.pop(reply.request_id, None)
        if landing is not None:
            landing.receive(reply)
        with self._lock:
            waiter.reply = reply
            if waiter.wake is not None:
                waiter.wake.release()

    def _abandon(self, waiter: _Waiter) -> None:
        """The thread was interrupted, or the link is lost. What a reply brings is its landing's affair."""
        waiter.abandoned = True
        if leaves_unknown_state(waiter.request):
            self._link.lose(
                ConnectionFailed("a seal was interrupted, so what is held is unknown; the session was closed")
            )
        elif waiter.leads and self._is_transferring:
            self._lose_interrupted()

    def _lose_interrupted(self) -> None:
        self._link.lose(
            ConnectionFailed(
                "the client was interrupted within a message, so what is held is unknown; the session was closed"
            )
        )

    def _pass_lead_on(self, leader: _Waiter) -> None:
        """Does again what an interrupted call has left undone."""
        with self._lock:
            followers = [
                waiter for waiter in self._waiters.values() if waiter.wake is not None and not waiter.abandoned
            ]
            # When the link is lost nobody need lead: all are woken and find that out.
            is_lost = self._link.lost is not None
            if leader.leads:
                # No call between the stores, so that no signal is heeded there.
                if followers and not is_lost:
                    followers[0].leads, leader.leads = True, False
                else:
                    self._has_leader = leader.leads = False
            for waiter in followers:
                if waiter.leads or is_lost:
                    wake, waiter.wake = waiter.wake, None
                    if wake is not None:
                        wake.release()
            if not self._has_leader:
                self._leaderless.notify_all()
        self._flush_idle()

    def _flush_idle(self) -> None:
        # After each release of the lock the queue is looked at again, so nothing posted meanwhile is left behind.
        while self._outgoing and not self._is_led() and self._lock.acquire(blocking=False):
            try:
                if self._is_led():
                    return
                if self._closed or self._link.lost is not None:
                    self._outgoing.clear()
                    return
                num_before = len(self._outgoing)
                self._send_outgoing()
                if len(self._outgoing) == num_before:
                    return  # the queue to the daemon is full: the next request takes these along
            finally:
                self._lock.release()

    def _is_led(self) -> bool:
        return self._has_leader

    def _poke(self) -> None:
        """Has the leader look up."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except OSError:
            return  # closed meanwhile, or it has been poked 2**64 times and is awake anyway

    def _drain_pokes(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Closes the socket. The link is lost by then, so threads that still wait end with that. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._has_leader:
                self._poke()
                self._leaderless.wait()
            self._outgoing.clear()
            self._dealer.close()
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._context.term()

    def _forget_in_child(self) -> None:
        # The eventfd is the parent's. ZeroMQ's objects are left alone.
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1
