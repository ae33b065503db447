"""The session socket's listener, and its connections up to their Hello."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kvd.errors import InvalidRequest, KvdError, Overloaded, RequestTimeout
from kvd.protocol.session import MAX_DATAGRAM_NBYTES, Hello, Refused, decode_from_client, encode
from kvd.protocol.wire import PROTOCOL_MAX, PROTOCOL_MIN
from kvd.server.channel import Channel
from kvd.server.counters import ServerCounters
from kvd.server.headroom import OWN_RESERVE, is_scarce
from kvd.server.kernel import PeerCredentials, peer_credentials
from kvd.server.watch import Watch

HELLO_TIMEOUT_S = 5.0
MAX_SILENT = 256
"""Connections without a Hello; the oldest goes when another comes, so silent ones never shut others out."""
MAX_SILENT_PER_PROCESS = 16
"""Of one process, likewise: it takes its own places before those of others."""
_MAX_ACCEPTS_PER_TURN = 16
_PAUSE_S = 0.1
"""How long nobody is accepted after descriptors ran out: the listener stays readable, and would spin the loop."""


@dataclass(slots=True)
class _Arrival:
    connection: socket.socket
    credentials: PeerCredentials
    deadline_s: float


class Lobby:
    """Accepts connections and hands each to `welcome(connection, credentials, hello)` once it has said Hello.

    Loop thread only. `welcome` owns the connection from then on; it may raise a `KvdError`, which refuses it.
    """

    def __init__(
        self,
        listener: socket.socket,
        watch: Watch,
        counters: ServerCounters,
        welcome: Callable[[socket.socket, PeerCredentials, Hello], None],
        clock: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._watch = watch
        self._counters = counters
        self._welcome = welcome
        self._clock = clock
        self._silent: dict[int, _Arrival] = {}  # in order of arrival, so the first one's deadline is the next
        self._resume_at_s: float | None = None
        watch.add(listener.fileno(), self._accept)

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        if self._resume_at_s is not None:
            return self._resume_at_s
        return next((arrival.deadline_s for arrival in self._silent.values()), None)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._watch.remove(self._listener.fileno())
                    self._resume_at_s = self._clock() + _PAUSE_S
                    return
                continue  # that connection failed, not the listener
            connection.setblocking(False)
            self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        credentials = peer_credentials(connection)
        if is_scarce(connection.fileno(), OWN_RESERVE):
            self._refuse(connection, Overloaded("the daemon is short of file descriptors; raise LimitNOFILE"))
            return
        alike = [key for key, arrival in self._silent.items() if arrival.credentials.pid == credentials.pid]
        if len(alike) >= MAX_SILENT_PER_PROCESS:
            self._give_up(alike[0])
        elif len(self._silent) >= MAX_SILENT:
            self._give_up(next(iter(self._silent)))
        descriptor = connection.fileno()
        self._silent[descriptor] = _Arrival(connection, credentials, self._clock() + HELLO_TIMEOUT_S)
        self._watch.add(descriptor, lambda: self._read(descriptor))
        self._read(descriptor)  # most say Hello at once

    def _read(self, descriptor: int) -> None:
        arrival = self._silent[descriptor]
        try:
            # Of one that is too long this is no whole message, and refused as such.
            datagram = arrival.connection.recv(MAX_DATAGRAM_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            datagram = b""
        del self._silent[descriptor]
        self._watch.remove(descriptor)
        if not datagram:
            arrival.connection.close()
            return
        try:
            hello = decode_from_client(datagram)
            if not isinstance(hello, Hello):
                raise InvalidRequest("the first message of a client is a hello")
            self._welcome(arrival.connection, arrival.credentials, hello)
        except KvdError as error:
            self._refuse(arrival.connection, error)

    def _refuse(self, connection: socket.socket, error: KvdError) -> None:
        self._counters.num_sessions_refused += 1
        channel = Channel(connection)
        channel.send(encode(Refused(error.code, str(error)[:1000], PROTOCOL_MIN, PROTOCOL_MAX)))
        channel.close()

    def _give_up(self, descriptor: int) -> None:
        self._counters.num_hello_timeouts += 1
        self._watch.remove(descriptor)
        self._refuse(self._silent.pop(descriptor).connection, RequestTimeout("no hello came"))

    def expire(self, now_s: float) -> None:
        """Lets go of connections that said nothing in time, and accepts again after a pause."""
        while self._silent:
            descriptor, arrival = next(iter(self._silent.items()))
            if arrival.deadline_s > now_s:
                break
            self._give_up(descriptor)
        if self._resume_at_s is not None and now_s >= self._resume_at_s:
            self._resume_at_s = None
            self._watch.add(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts nobody any more; who has not said Hello is let go."""
        self._watch.remove(self._listener.fileno())
        # Connecting fails from now on. Whoever made the listener closes it, once its file is removed.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for descriptor, arrival in self._silent.items():
            self._watch.remove(descriptor)
            arrival.connection.close()
        self._silent.clear()
