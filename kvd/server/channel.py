"""The daemon's end of one session socket: what is sent on it leaves in order, and never blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque

from kvd.protocol.session import MAX_DATAGRAM_NBYTES
from kvd.server.headroom import OWN_RESERVE, is_scarce

MAX_PENDING = 1024
"""Datagrams that wait because the client does not read. Past it, the client has stopped playing along."""

_BLOCKED = {errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM}
"""The last three pass by themselves: too many descriptors in flight, or a short lack of kernel memory."""
_MAX_DRAINED = 64


class Channel:
    """Sends datagrams, some with a descriptor, over a connected SOCK_SEQPACKET socket.

    Loop thread only. What the socket does not take now waits here, each with a duplicate of its descriptor, until
    `flush`. `close()` is idempotent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._pending: deque[tuple[bytes, int | None, bool]] = deque()
        self._broken = False
        self._is_short = False
        self.num_grants = 0
        """Grants given to `send` so far."""
        self.num_grants_sent = 0
        """Grants that have left; a reply that needs the nth grant may follow once this reaches n."""

    def fileno(self) -> int:
        """The socket's descriptor, for epoll."""
        return self._socket.fileno()

    @property
    def is_blocked(self) -> bool:
        """Whether something waits for the client to read."""
        return bool(self._pending)

    @property
    def is_overfull(self) -> bool:
        """Whether more waits than any client that reads at all lets come together, or than we have descriptors for."""
        return self._is_short or len(self._pending) > MAX_PENDING

    def send(self, datagram: bytes, descriptor: int | None = None, *, is_grant: bool = False) -> None:
        """Sends now, or as soon as what is before it has left. Never raises: the end of the socket is seen by epoll."""
        self.num_grants += is_grant
        if not self._pending and self._try_send(datagram, descriptor):
            self.num_grants_sent += is_grant
            return
        try:
            # The segment may be gone, and its descriptor's number another's, by the time the client reads.
            duplicate = None if descriptor is None else os.dup(descriptor)
        except OSError:
            self._is_short = True
            return
        if duplicate is not None and is_scarce(duplicate, OWN_RESERVE):
            os.close(duplicate)
            self._is_short = True
            return
        self._pending.append((datagram, duplicate, is_grant))

    def flush(self) -> bool:
        """Sends what waits, as far as the socket takes it; whether nothing waits any more."""
        while self._pending:
            datagram, descriptor, is_grant = self._pending[0]
            if not self._try_send(datagram, descriptor):
                return False
            self._pending.popleft()
            self.num_grants_sent += is_grant
            if descriptor is not None:
                os.close(descriptor)
        return True

    def _try_send(self, datagram: bytes, descriptor: int | None) -> bool:
        """False when it must wait. On a broken socket everything counts as sent: nobody is there to miss it."""
        if self._broken:
            return True
        try:
            if descriptor is None:
                self._socket.send(datagram, socket.MSG_NOSIGNAL)
            else:
                socket.send_fds(self._socket, [datagram], [descriptor], socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno in _BLOCKED:
                return False
            self._broken = True
        return True

    def receive(self) -> bytes | None:
        """The next datagram of the client, cut off past what one may have; None for nothing, b"" at the end."""
        for _ in range(2):
            try:
                return self._socket.recv(MAX_DATAGRAM_NBYTES + 1)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # It closed with datagrams of ours unread. The kernel says so once, before it hands out what was sent.
                continue
            except OSError:
                break
        return b""

    def is_at_end(self) -> bool:
        """Whether nobody holds the other end any more. Passes over what the client may have sent."""
        for _ in range(_MAX_DRAINED):
            if not (received := self.receive()):
                return received is not None
        return False

    def close(self) -> None:
        """Closes the socket; what was sent can still be read by the client."""
        for _, descriptor, _ in self._pending:
            if descriptor is not None:
                os.close(descriptor)
        self._pending.clear()
        with contextlib.suppress(OSError):
            # Closing over unread data would reset the connection, and the client would lose a Goodbye it has not read.
            for _ in range(_MAX_DRAINED):
                if not self._socket.recv(1):
                    break
        self._socket.close()
