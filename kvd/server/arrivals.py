"""Watches ZeroMQ connections arrive, before their handshake, and cuts those that have no business here.

`admission` keeps strangers from sending messages; this keeps them from using up descriptors, of which libzmq must never
run out (see `headroom`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable

import zmq

from kvd.server.connections import Process, accepted_connection
from kvd.server.counters import ServerCounters
from kvd.server.headroom import ZMQ_RESERVE, is_scarce

_ENDPOINT = "inproc://kvd.arrivals"
_EVENT = struct.Struct("=Hi")
"""zmq_socket_monitor(3): the event, and its value, here the accepted descriptor."""
_MAX_PER_TURN = 256


class Arrivals:
    """One entry of the poller. Loop thread only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        path: str,
        welcome: Callable[[Process], bool],
        counters: ServerCounters,
    ) -> None:
        """`path` of the ROUTER's socket; `welcome(process)` says whether it may make one more connection."""
        self._router = router
        self._path = path
        self._welcome = welcome
        self._counters = counters
        router.monitor(_ENDPOINT, zmq.EVENT_ACCEPTED)
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        # Without a bound: libzmq's thread would wait for us with a lock held that closing the ROUTER needs.
        self.socket.rcvhwm = 0
        self.socket.connect(_ENDPOINT)

    def serve(self) -> None:
        """Looks at the connections that came."""
        for _ in range(_MAX_PER_TURN):
            try:
                event, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _, descriptor = _EVENT.unpack(event)
            self._look_at(descriptor)

    def _look_at(self, descriptor: int) -> None:
        try:
            # libzmq's thread may close it, and reuse its number, at any moment.
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return
        with connection:
            process = accepted_connection(connection, self._path)
            if process is None or (self._welcome(process) and not is_scarce(descriptor, ZMQ_RESERVE)):
                return
            self._counters.num_peers_denied += 1
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Call it before the ROUTER is closed."""
        self._router.disable_monitor()
        self.socket.close()
