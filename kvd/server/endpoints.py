"""The two sockets in the runtime folder: made with the right owner and mode, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvd.errors import RuntimeFolderError
from kvd.protocol.session import REQUEST_SOCKET, SESSION_SOCKET
from kvd.server.admission import Admission
from kvd.server.arrivals import Arrivals
from kvd.server.connections import Process
from kvd.server.counters import ServerCounters
from kvd.server.router import bind_router, seed_libzmq

MAX_SOCKET_PATH_NBYTES = 107
"""unix(7): sun_path has 108 bytes, a NUL among them. libzmq's limit for ipc:// is the same."""
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketAccess:
    """Who may connect: the permission bits of both sockets, and the group they belong to (None leaves our own)."""

    mode: int = 0o600
    gid: int | None = None


class Endpoints:
    """The session listener, the ROUTER and its doorkeeper. `close()` is idempotent and removes both socket files.

    Only if they are still the ones made here: once our lock file is gone, another daemon may serve the same folder.

    Whoever makes this holds the runtime folder's lock: a socket that lies there already is a dead daemon's, and goes.
    Raises `RuntimeFolderError`; nothing half made stays behind.
    """

    def __init__(
        self,
        folder: Path,
        access: SocketAccess,
        *,
        credits: int,
        admit: Callable[[str], bool],
        welcome: Callable[[Process], bool],
        counters: ServerCounters,
    ) -> None:
        self.session_path = folder / SESSION_SOCKET
        self.request_path = folder / REQUEST_SOCKET
        for path in (self.session_path, self.request_path):
            check_socket_path(path)
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            seed_libzmq()
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(context.term)
            self.admission = Admission(context, admit, counters)
            undo.callback(self.admission.close)
            with _umask(access):
                self.router = bind_router(context, str(self.request_path), credits=credits)
            undo.callback(self.router.close)
            undo.callback(_remove, self.request_path, file_identity(self.request_path))
            self.arrivals = Arrivals(context, self.router, str(self.request_path), welcome, counters)
            undo.callback(self.arrivals.close)
            with _umask(access):
                self.listener = _listen(self.session_path)
            undo.callback(self.listener.close)
            undo.callback(_remove, self.session_path, file_identity(self.session_path))
            for path in (self.session_path, self.request_path):
                _hand_over(path, access)
            self._closing = undo.pop_all()

    def close(self) -> None:
        """Closes everything; nobody can connect any more."""
        self._closing.close()


def check_socket_path(path: Path) -> None:
    """Raises `RuntimeFolderError` for a path that no unix socket can have, or that libzmq cannot be given."""
    name = os.fsencode(path)
    try:
        name.decode()
    except UnicodeDecodeError as error:
        raise RuntimeFolderError(f"the path {name!r} is not UTF-8: choose another runtime folder") from error
    nbytes = len(name)
    if nbytes > MAX_SOCKET_PATH_NBYTES:
        raise RuntimeFolderError(
            f"the path of a unix socket has at most {MAX_SOCKET_PATH_NBYTES} bytes, {path} has {nbytes}: "
            f"choose a shorter runtime folder"
        )


def _listen(path: Path) -> socket.socket:
    with contextlib.suppress(OSError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RuntimeFolderError(f"cannot make the socket {path}: {error.strerror}") from error
    return listener


@contextlib.contextmanager
def _umask(access: SocketAccess) -> Iterator[None]:
    """A socket is born with no more than its own mode: there is no moment at which others may connect."""
    before = os.umask(0o777 & ~access.mode)
    try:
        yield
    finally:
        os.umask(before)


def _hand_over(path: Path, access: SocketAccess) -> None:
    try:
        # It is ours already where our own group is the one: the service's sandbox has no chown(2).
        if access.gid is not None and path.stat().st_gid != access.gid:
            os.chown(path, -1, access.gid)
        path.chmod(access.mode)
    except OSError as error:
        raise RuntimeFolderError(
            f"cannot give {path} to group {access.gid}: {error.strerror}; the daemon's user must be in that group"
        ) from error


def file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode number; no other file has them as long as this one is open. None when it is not there."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove(path: Path, made: tuple[int, int] | None) -> None:
    """While the socket is still open: its inode number cannot be another's yet."""
    if made is not None and file_identity(path) == made:
        with contextlib.suppress(OSError):
            path.unlink()
