"""The loop: one turn after another, each bounded, none of them blocking on any client."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from kvd.block import SessionId
from kvd.errors import DaemonRestarted, InvalidRequest, KvdError, VersionMismatch
from kvd.protocol.requests import Request
from kvd.protocol.session import Farewell, Goodbye, Hello, SegmentClosed, Welcome, decode_from_client, encode
from kvd.protocol.wire import PROTOCOL_MAX, PROTOCOL_MIN
from kvd.server.channel import Channel
from kvd.server.connections import cut_connections
from kvd.server.counters import ServerCounters
from kvd.server.endpoints import Endpoints, SocketAccess
from kvd.server.guard import MemoryGuard
from kvd.server.incoming import Receiver
from kvd.server.kernel import PeerCredentials, open_pidfd, parse_peer_address
from kvd.server.limits import Limits
from kvd.server.lingering import Lingering
from kvd.server.lobby import Lobby
from kvd.server.outgoing import Sender
from kvd.server.sessions import Session, Sessions
from kvd.server.watch import Watch
from kvd.service import Identity, ServerFigures, Service

HEARTBEAT_S = 0.1
"""At most this often; an idle loop wakes up for it every `IDLE_HEARTBEAT_S` only."""
IDLE_HEARTBEAT_S = 0.5
MAX_CLAIM_LENGTH = 128
"""Characters kept of a label or version that a client claims."""
_log = logging.getLogger(__name__)


class Server:
    """Everything between the two sockets and the service. Make it, run it and close it on one thread.

    Invariant, between turns: the service knows a session exactly as long as `sessions` does, and that is as long as
    its process lives and its session socket is open.

    Raises `RuntimeFolderError` when the sockets cannot be made. The caller holds the runtime folder's lock.
    """

    def __init__(
        self,
        service: Service,
        *,
        folder: Path,
        access: SocketAccess,
        control_page_fd: int,
        epoch: int,
        version: str,
        limits: Limits,
        on_heartbeat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self.counters = ServerCounters()
        self.sessions = Sessions()
        self._control_page_fd = control_page_fd
        self._epoch = epoch
        self._version = version
        self.limits = limits
        self._on_heartbeat = on_heartbeat
        self._clock = clock
        self._is_stopping = False
        self._heartbeat_at_s = clock()
        with contextlib.ExitStack() as undo:
            self._endpoints = Endpoints(
                folder,
                access,
                credits=self.limits.credits,
                admit=self.sessions.admit,
                welcome=self.sessions.welcome,
                counters=self.counters,
            )
            undo.callback(self._endpoints.close)
            self._watch = Watch()
            undo.callback(self._watch.close)
            self._connect_parts()
            undo.pop_all()

    def _connect_parts(self) -> None:
        self._admission = self._endpoints.admission
        self._arrivals = self._endpoints.arrivals
        self._router = self._endpoints.router
        self._sender = Sender(self._router, self.sessions, self._watch, self.counters, self.limits.credits, self._clock)
        self._receiver = Receiver(
            self._router,
            self.sessions,
            self.counters,
            epoch=self._epoch,
            limits=self.limits,
            handle=self._handle,
            answer=self._sender.reply,
            expel=self.expel,
        )
        self._lobby = Lobby(self._endpoints.listener, self._watch, self.counters, self._open_session, self._clock)
        self._lingering = Lingering(self._watch, overdue=self._lives_on, gone=self._is_gone, clock=self._clock)
        self._guard = MemoryGuard(str(self._endpoints.request_path))
        self._poller = zmq.Poller()
        for entry in (self._router, self._admission.socket, self._arrivals.socket, self._watch.fileno()):
            self._poller.register(entry, zmq.POLLIN)
        self.service.server_figures = self._figures

    def run(self) -> None:
        """Turns until `stop` is called, which a callback of `watch_descriptor` may do."""
        while not self._is_stopping:
            self.turn()

    def stop(self) -> None:
        """Ends `run` after the current turn."""
        self._is_stopping = True

    def watch_descriptor(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Calls `callback` on the loop whenever the descriptor is readable (signals, memory that is ready)."""
        self._watch.add(descriptor, lambda: self._call(callback))

    def turn(self) -> None:
        """Waits for something to happen, then serves a bounded share of it."""
        ready = {entry for entry, _ in self._poller.poll(self._patience_ms())}
        # The dead first: what they still had queued must find their sessions ended.
        if self._watch.fileno() in ready:
            self._watch.dispatch()
            self._settle()
        if self._arrivals.socket in ready:
            self._arrivals.serve()
        if self._admission.socket in ready:
            self._admission.serve()
        if self._router in ready:
            self._receiver.serve()
            self._settle()
        self._keep_house(self._clock())

    def _patience_ms(self) -> int:
        earliest_s = self._heartbeat_at_s + IDLE_HEARTBEAT_S
        for deadline_s in (
            self.service.next_deadline_s,
            self._lobby.next_deadline_s,
            self._lingering.next_deadline_s,
            self._sender.retry_at_s,
        ):
            if deadline_s is not None and deadline_s < earliest_s:
                earliest_s = deadline_s
        return max(0, math.ceil((earliest_s - self._clock()) * 1000))

    def _keep_house(self, now_s: float) -> None:
        self._sender.retry(now_s)
        self._lobby.expire(now_s)
        self._lingering.expire(now_s)
        deadline_s = self.service.next_deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            self._call(lambda: self.service.tick(now_s))
        if now_s - self._heartbeat_at_s >= HEARTBEAT_S:
            self._heartbeat_at_s = now_s
            self._cut_strays()
            self._expel_hoarders()
            self._on_heartbeat()

    def _cut_strays(self) -> None:
        """Who sends under tokens that are not its own, and has no session, loses its ZeroMQ connection."""
        if not self._receiver.strays:
            return
        peers = [parse_peer_address(address) for address in self._receiver.strays]
        self._receiver.strays.clear()
        strangers = {
            (peer.pid, peer.uid) for peer in peers if peer is not None and not self.sessions.num_of_process(peer)
        }
        if strangers:
            cut_connections(str(self._endpoints.request_path), strangers)

    def _expel_hoarders(self) -> None:
        """Who fills our memory with a message without end is sent away."""
        hoarders = self._guard.look(self.sessions.num_messages())
        for process in hoarders:
            for session in self.sessions.of_process(process):
                self.expel(session, InvalidRequest("a message is exactly one frame, and this one has no end"))
        if hoarders:
            cut_connections(str(self._endpoints.request_path), hoarders)

    def _call(self, step: Callable[[], object]) -> None:
        step()
        self._settle()

    def _handle(self, session: Session, request: Request) -> None:
        self.service.handle(session.id, request)
        self._sender.deliver(self.service.outbox)

    def _settle(self) -> None:
        """Sends what the service wants sent, and ends who cannot take it; that in turn may wake others.

        After every single call into the service its outbox is delivered, since a grant's descriptor is valid only until
        the next; ending sessions is such a call, so it never happens inside a delivery.
        """
        self._sender.deliver(self.service.outbox)
        while self._sender.condemned:
            self.expel(*self._sender.condemned.pop())

    def _figures(self) -> ServerFigures:
        return ServerFigures(
            counters=self.counters.as_dict(), stalled=frozenset(session.id for session in self._sender.stalled)
        )

    def _open_session(self, connection: socket.socket, credentials: PeerCredentials, hello: Hello) -> None:
        protocol = min(hello.protocol_max, PROTOCOL_MAX)
        if protocol < max(hello.protocol_min, PROTOCOL_MIN):
            raise VersionMismatch(
                f"this daemon ({self._version}) speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, the client "
                f"({_printable(hello.client_version)}) {hello.protocol_min} to {hello.protocol_max}"
            )
        self.limits.check_session(self.sessions, self._lingering, credentials)
        session_id = self.service.open_session(
            Identity(credentials.pid, credentials.uid, credentials.gid),
            label=_printable(hello.label),
            client_version=_printable(hello.client_version),
        )
        session = Session(
            session_id,
            self.sessions.new_token(),
            credentials,
            Channel(connection),
            open_pidfd(connection, credentials),
        )
        self.sessions.add(session)
        self.counters.num_sessions_opened += 1
        self._watch.add(session.channel.fileno(), lambda: self._on_channel(session))
        if session.pidfd is not None:
            self._watch.add(session.pidfd, lambda: self._on_exit(session))
        welcome = Welcome(protocol, self._version, self._epoch, session.id, session.token, self.limits.credits)
        session.channel.send(encode(welcome), self._control_page_fd)
        _log.debug("session %d opened: pid %d, uid %d", session.id, credentials.pid, credentials.uid)

    def _on_channel(self, session: Session) -> None:
        self._sender.flush(session)
        received = session.channel.receive()
        if received == b"":
            self._end(session, is_done=session.has_said_farewell)
        elif received is not None:
            self._take_in(session, received)

    def _take_in(self, session: Session, datagram: bytes) -> None:
        try:
            message = decode_from_client(datagram)
        except InvalidRequest as error:
            self.expel(session, error)
            return
        if isinstance(message, SegmentClosed):
            self.service.segment_closed(session.id, message.pool, message.segment)
        elif isinstance(message, Farewell):
            session.has_said_farewell = True
        else:
            self.expel(session, InvalidRequest("a client says hello once"))

    def _on_exit(self, session: Session) -> None:
        if not session.channel.is_at_end():
            # A forked child still holds the socket. It is not the process that was given the session.
            self.counters.num_exits_seen_by_pidfd += 1
        self._end(session, is_done=True)

    def expel(self, session: Session, error: KvdError) -> None:
        """Ends a session against its will, and says why as far as it still listens."""
        if self.sessions.get(session.id) is not session:
            return
        self.counters.num_sessions_expelled += 1
        who = {
            "session": session.id,
            "pid": session.credentials.pid,
            "uid": session.credentials.uid,
            "error": error.code,
        }
        _log.warning("session %d (pid %d) ended: %s", session.id, session.credentials.pid, error, extra={"kvd": who})
        session.channel.send(encode(Goodbye(error.code, str(error))))
        self._end(session, is_done=False)
        if not self.sessions.num_of_process(session.credentials):
            cut_connections(str(self._endpoints.request_path), {session.process})

    def _end(self, session: Session, *, is_done: bool) -> None:
        """The session is over: its token is dead before its leases go back, so nothing late can revive it.

        `is_done`: its process does nothing on a card any more with what it held there. Else that waits for its end.
        """
        self.sessions.remove(session)
        self._sender.forget(session)
        self._watch.remove(session.channel.fileno())
        session.channel.close()
        if session.pidfd is not None:
            self._watch.remove(session.pidfd)
        self.counters.num_sessions_ended += 1
        _log.debug("session %d ended", session.id)
        # Without a pidfd its process is gone, or in another PID namespace, where no handle of a card can be opened.
        lingers = self.service.end_session(session.id, may_linger=not is_done and session.pidfd is not None)
        if session.pidfd is not None:
            if lingers:
                self._lingering.add(session.id, session.credentials, session.pidfd)
            else:
                os.close(session.pidfd)
        self._sender.deliver(self.service.outbox)

    def _lives_on(self, session: SessionId) -> None:
        if self.service.end_lingering(session):
            _log.warning("what session %d had reserved on a card is given to others: its process lives on", session)
        self._settle()

    def _is_gone(self, session: SessionId) -> None:
        self.service.process_ended(session)
        self._settle()

    def close(self) -> None:
        """Tells every client, ends every session, removes the sockets. Idempotent."""
        self._lobby.close()
        error = DaemonRestarted("the daemon was stopped")
        for session in self.sessions:
            session.channel.send(encode(Goodbye(error.code, str(error))))
        for session in self.sessions:
            if self.sessions.get(session.id) is session:
                self._end(session, is_done=session.has_said_farewell)
        self._lingering.close()
        self._watch.close()
        self._endpoints.close()


def _printable(claim: str) -> str:
    """A client's text, fit to be shown on a terminal."""
    return "".join(char for char in claim[:MAX_CLAIM_LENGTH] if char.isprintable())
