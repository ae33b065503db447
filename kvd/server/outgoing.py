"""Sends what the service put into its outbox: grants before the replies that need them, never blocking, bounded."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable

import zmq

from kvd.errors import Overloaded
from kvd.protocol import session as session_messages
from kvd.protocol import wire
from kvd.protocol.replies import Reply
from kvd.server.counters import ServerCounters
from kvd.server.sessions import Session, Sessions
from kvd.server.watch import Watch
from kvd.service import Outgoing, SendGrant, SendReply

RETRY_S = 0.01
"""A stalled session's replies are tried again this often; libzmq has no event for one peer of a ROUTER."""


class Sender:
    """Hands replies to ZeroMQ and grants to session sockets. Loop thread only.

    A session that breaks the bounds is appended to `condemned`, with the reason, for the loop to end: ending it here
    would call into the service, which may close descriptors that grants still in the outbox name.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        sessions: Sessions,
        watch: Watch,
        counters: ServerCounters,
        credits: int,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._sessions = sessions
        self._watch = watch
        self._counters = counters
        self._credits = credits
        self._clock = clock
        self._stalled: dict[Session, None] = {}
        self.condemned: list[tuple[Session, Overloaded]] = []
        self.retry_at_s: float | None = None
        """When stalled sessions are tried again."""

    @property
    def stalled(self) -> list[Session]:
        """Sessions whose replies wait because they do not read."""
        return list(self._stalled)

    def deliver(self, outbox: deque[Outgoing]) -> None:
        """Empties the service's outbox."""
        while outbox:
            item = outbox.popleft()
            session = self._sessions.get(item.session)
            if session is None:
                continue  # it ended before this could be said
            if isinstance(item, SendReply):
                self.reply(session, item.message)
            elif isinstance(item, SendGrant):
                self._send_on_channel(session, session_messages.encode(item.message), item.descriptor, is_grant=True)
            else:
                self._send_on_channel(session, session_messages.encode(item.message), None, is_grant=False)

    def reply(self, session: Session, message: Reply) -> None:
        """Answers one request; the reply waits behind the grants given before it, and behind earlier replies."""
        frame = wire.encode(message)
        needs = session.channel.num_grants
        if session.outbox or session.channel.num_grants_sent < needs or not self._try_send(session, frame):
            if len(session.outbox) >= self._credits:
                self._condemn(session, "it does not read its replies")
                return
            session.outbox.append((needs, frame))

    def flush(self, session: Session) -> None:
        """Sends what waits for this session, as far as the session takes it."""
        if session.channel.is_blocked and session.channel.flush():
            self._watch.want_write(session.channel.fileno(), False)
        while session.outbox:
            needs, frame = session.outbox[0]
            if session.channel.num_grants_sent < needs or not self._try_send(session, frame):
                return
            session.outbox.popleft()

    def retry(self, now_s: float) -> None:
        """Tries stalled sessions again when it is time."""
        if self.retry_at_s is None or now_s < self.retry_at_s:
            return
        self.retry_at_s = now_s + RETRY_S
        for session in self.stalled:
            self.flush(session)
        if not self._stalled:
            self.retry_at_s = None

    def forget(self, session: Session) -> None:
        """The session has ended."""
        self._stalled.pop(session, None)
        if not self._stalled:
            self.retry_at_s = None

    def _send_on_channel(self, session: Session, datagram: bytes, descriptor: int | None, *, is_grant: bool) -> None:
        was_blocked = session.channel.is_blocked
        session.channel.send(datagram, descriptor, is_grant=is_grant)
        if session.channel.is_overfull:
            self._condemn(session, "it does not read its session socket")
        elif session.channel.is_blocked and not was_blocked:
            self._watch.want_write(session.channel.fileno(), True)

    def _condemn(self, session: Session, why: str) -> None:
        if all(session is not other for other, _ in self.condemned):
            self.condemned.append((session, Overloaded(f"the session was ended because {why}")))

    def _try_send(self, session: Session, frame: bytes) -> bool:
        """False when ZeroMQ has no room for this peer."""
        try:
            # With ROUTER_MANDATORY only the first part can fail: a peer with room for it takes the whole message.
            self._router.send(session.token, zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            if session not in self._stalled:
                self._stalled[session] = None
                self._counters.num_stalls += 1
                self.retry_at_s = self.retry_at_s or self._clock() + RETRY_S
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            # Its connection is gone; the end of the session socket, or of the process, ends the session itself.
            self._counters.num_unroutable += 1
        else:
            self._counters.num_replies += 1
        session.answered()
        self._stalled.pop(session, None)
        return True
