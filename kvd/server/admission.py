"""Who may speak to the ROUTER at all: libzmq asks (ZAP, RFC 27) before a connection can send its first message.

A process without a session is turned away in the handshake, so that a stranger can neither queue messages nor take
routing ids. It also bounds how often libzmq invents a routing id for a peer that has none: a peer that had claimed
that very id beforehand would bring the whole process down.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from kvd.server.counters import ServerCounters

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvd"
_MAX_PER_TURN = 32


class Admission:
    """Answers libzmq's questions about new connections. Loop thread only. Make it before the ROUTER binds."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], admit: Callable[[str], bool], counters: ServerCounters
    ) -> None:
        """`admit(peer_address)` decides; see `kvd.server.sessions.Sessions.admit`."""
        self._admit = admit
        self._counters = counters
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def serve(self) -> None:
        """Answers what is waiting, at most a few so that requests get their turn."""
        for _ in range(_MAX_PER_TURN):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # version, request id, domain, address, routing id, mechanism
            allowed = self._admit(question[3].decode("ascii", "replace"))
            self._counters.num_peers_denied += not allowed
            status = [b"200", b"OK"] if allowed else [b"400", b"no session of this process"]
            self.socket.send_multipart([question[0], question[1], *status, b"", b""])

    def close(self) -> None:
        """Close the ROUTER first: libzmq must never wait for an answer that cannot come."""
        self.socket.close()
