"""A process's ZeroMQ connections, which libzmq itself does not show: how much they have sent, and an end to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

from kvd.server.kernel import peer_credentials

Process = tuple[int, int]
"""(pid, uid)."""


def cut_connections(path: str, processes: AbstractSet[Process]) -> int:
    """Shuts down every connection on the unix socket `path` that one of these processes made; how many.

    libzmq then sees the connection's end, and forgets the peer and the part of a message that it had sent.
    """
    num_cut = 0
    for connection, process in _accepted_connections(path):
        if process in processes:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                num_cut += 1
    return num_cut


def processes_with_unread_bytes(path: str) -> set[Process]:
    """Processes that have sent more on the unix socket `path` than libzmq has read so far."""
    found = set()
    for connection, process in _accepted_connections(path):
        with contextlib.suppress(OSError):
            (num_unread,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
            if num_unread:
                found.add(process)
    return found


def _accepted_connections(path: str) -> Iterator[tuple[socket.socket, Process]]:
    """Found among our own open descriptors, some 3 us for each of these: for rare use.

    Each is looked at through a duplicate, since libzmq's thread may close it, and reuse its number, at any moment.
    """
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)  # no socket
            continue
        with connection:
            process = accepted_connection(connection, path)
            if process is not None:
                yield connection, process


def accepted_connection(connection: socket.socket, path: str) -> Process | None:
    """Who made this connection to the unix socket `path`; None when it is anything else."""
    try:
        if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
            return None
        if connection.getsockname() != path or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        peer = peer_credentials(connection)
    except OSError:
        return None
    return peer.pid, peer.uid
