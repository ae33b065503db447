"""What the kernel says about the other end of a unix socket. The only source of identity there is."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

SO_PEERPIDFD = 77
"""Linux 6.5; Python has no name for it yet. Same number on every architecture but parisc and sparc."""

_UCRED = struct.Struct("iII")


class PeerCredentials(NamedTuple):
    """The process that called connect(2), as SO_PEERCRED gives it; pid is 0 where our PID namespace cannot see it."""

    pid: int
    uid: int
    gid: int

    @property
    def peer_address(self) -> str:
        """The same as libzmq writes it into the Peer-Address of every message that arrives over ipc://."""
        return f"localhost:{self.uid}:{self.gid}:{self.pid}"


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Who connected this unix socket."""
    return PeerCredentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def parse_peer_address(text: str) -> PeerCredentials | None:
    """The inverse of `PeerCredentials.peer_address`; None for anything else."""
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts[1:]):
        return None
    uid, gid, pid = map(int, parts[1:])
    return PeerCredentials(pid, uid, gid)


def open_pidfd(connection: socket.socket, credentials: PeerCredentials) -> int | None:
    """A descriptor that becomes readable when the process at the other end exits; the caller closes it.

    SO_PEERPIDFD means that very process, even if its pid has been taken since. Older kernels give pidfd_open(2) on the
    pid: the connection is checked afterwards by whoever reads it, since a dead process's socket is at its end.
    None when the process is gone already, or is not visible from our PID namespace: then only the socket's end tells.
    """
    try:
        return struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]  # type: ignore[no-any-return]
    except OSError:
        pass
    try:
        return os.pidfd_open(credentials.pid) if credentials.pid > 0 else None
    except OSError:
        return None
