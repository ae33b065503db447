"""Reads the ROUTER: which session a message is from, and what it asks. Everything else is dropped and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import zmq

from kvd.errors import InvalidRequest, KvdError, Overloaded, VersionMismatch
from kvd.protocol import wire
from kvd.protocol.replies import Failed
from kvd.protocol.requests import Release, Request
from kvd.server.counters import ServerCounters
from kvd.server.limits import Limits
from kvd.server.salvage import request_id_of
from kvd.server.sessions import Session, Sessions

MESSAGES_PER_TURN = 64
"""At most this many, then other sockets get their turn. libzmq takes them from its peers one each in turn."""
_EXCESS_FRAMES_PER_MESSAGE = 256
"""Frames thrown away that cost as much time as one message."""
_MAX_ERROR_TEXT = 300


class Receiver:
    """Turns ROUTER messages into calls. Loop thread only.

    `handle(session, request)` for each good request, `answer(session, failed)` for one that is refused here, and
    `expel(session, error)` for a session that sent what is no message at all.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        sessions: Sessions,
        counters: ServerCounters,
        *,
        epoch: int,
        limits: Limits,
        handle: Callable[[Session, Request], None],
        answer: Callable[[Session, Failed], None],
        expel: Callable[[Session, KvdError], None],
    ) -> None:
        self._router = router
        self._sessions = sessions
        self._counters = counters
        self._epoch = epoch
        self._limits = limits
        self._handle = handle
        self._answer = answer
        self._expel = expel
        self._in_excess = False
        self.strays: set[str] = set()
        """Peer-Address of processes that sent something under a token that is not theirs, or no longer is."""

    def serve(self) -> None:
        """Serves up to `MESSAGES_PER_TURN` messages."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                if self._in_excess:
                    self._drop_excess()
                else:
                    self._serve_one()
            except zmq.Again:
                return
            # Asking costs half of what an exception does, and each turn would end with one.
            if not cast("int", self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return

    def _serve_one(self) -> None:
        head = self._router.recv(zmq.NOBLOCK, copy=False)
        body = self._router.recv(zmq.NOBLOCK, copy=False)  # a message is there as a whole or not at all
        token = head.bytes
        session = self._sessions.by_token.get(token)
        peer_address = str(head.get("Peer-Address"))
        if body.more:
            # Whoever sends two frames can send a million: they are read piecemeal, and their sender is sent away.
            self._in_excess = True
            self._counters.num_bad_frames += 1
            if session is not None and session.is_peer(peer_address):
                self._expel(session, InvalidRequest("a message is exactly one frame"))
            return
        if session is None:
            if self._sessions.was_ended(token):
                self._counters.num_late_messages += 1
            else:
                self._counters.num_unknown_tokens += 1
            self.strays.add(peer_address)
            return
        if not session.is_peer(peer_address):
            self._counters.num_wrong_peers += 1
            self.strays.add(peer_address)
            return
        session.num_messages += 1
        try:
            request = wire.decode_request(body.buffer)
        except (InvalidRequest, VersionMismatch) as error:
            self._counters.num_bad_frames += 1
            self._refuse(session, request_id_of(body.buffer), error)
            return
        self._counters.num_requests += 1
        if isinstance(request, Release) and not request.ack:
            # Nothing comes back, so nothing piles up; and a release that is dropped would be a leak.
            self._handle(session, request)
            return
        try:
            self._limits.check_request(session)
        except Overloaded as error:
            self._counters.num_overloaded += 1
            self._refuse(session, request.request_id, error)
            return
        session.took_request()
        self._handle(session, request)

    def _drop_excess(self) -> None:
        for _ in range(_EXCESS_FRAMES_PER_MESSAGE):
            self._counters.num_excess_frames += 1
            if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                self._in_excess = False
                return

    def _refuse(self, session: Session, request_id: int | None, error: KvdError) -> None:
        if request_id is None:
            return
        session.took_request()
        self._answer(session, Failed(request_id, self._epoch, error.code, str(error)[:_MAX_ERROR_TEXT]))
