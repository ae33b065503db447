"""The session socket: it opens the session, brings descriptors, and its end is the session's end.

After the hello only the close of device segments is told on it, of one or of all. Reading never blocks once the session
stands.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvd import __version__
from kvd.cuda import pid_namespace
from kvd.errors import (
    ConnectionFailed,
    DaemonUnavailable,
    InvalidRequest,
    KvdError,
    PermissionRefused,
    RequestTimeout,
    VersionMismatch,
    from_wire,
)
from kvd.protocol import session as wire_session
from kvd.protocol.wire import PROTOCOL_MAX, PROTOCOL_MIN

_MAX_DESCRIPTORS = 8
_DESCRIPTOR_NBYTES = array.array("i").itemsize


@dataclass(frozen=True, slots=True)
class Arrival:
    """One datagram and the descriptor that came beside it; the receiver owns the descriptor."""

    message: wire_session.FromDaemon
    fd: int | None


class SessionSocket:
    """A connected session socket. No thread is excluded; `Link` sees to that."""

    def __init__(self, runtime_dir: Path, *, label: str, timeout_s: float) -> None:
        """Opens the session. Raises `DaemonUnavailable`, `PermissionRefused`, `VersionMismatch`, `ConnectionFailed`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_s)
            self._connect(runtime_dir)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # A daemon that refuses without a look at the hello has closed already; why, is still to be read.
                self._socket.send(wire_session.encode(_hello(label)))
            self.welcome, control_page_fd = self._greeting(runtime_dir)
            self._control_page_fds = [] if control_page_fd is None else [control_page_fd]
            self._socket.setblocking(False)
        except KvdError:
            # First, since some of ours are OSErrors too.
            self._socket.close()
            raise
        except TimeoutError as error:
            self._socket.close()
            raise RequestTimeout(f"the daemon in {runtime_dir} did not greet within {timeout_s} s") from error
        except ConnectionError as error:
            self._socket.close()
            raise DaemonUnavailable(f"the daemon in {runtime_dir} ended as this client connected ({error})") from error
        except OSError as error:
            self._socket.close()
            raise ConnectionFailed(f"the session socket in {runtime_dir}: {error}") from error

    def _connect(self, runtime_dir: Path) -> None:
        try:
            self._socket.connect(str(runtime_dir / wire_session.SESSION_SOCKET))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise DaemonUnavailable(
                f"no daemon listens in {runtime_dir}; start one with `kvd serve`, or set KVD_RUNTIME_DIR"
            ) from error
        except PermissionError as error:
            raise PermissionRefused(
                f"this user may not connect to the daemon in {runtime_dir}; is it in the daemon's group?"
            ) from error

    def _greeting(self, runtime_dir: Path) -> tuple[wire_session.Welcome, int | None]:
        try:
            arrival = self._receive_one()
        except ConnectionResetError:
            # Closed with our hello unread: the kernel says so once, before it hands out what was sent.
            arrival = self._receive_one()
        if arrival is None:
            raise DaemonUnavailable(f"the daemon in {runtime_dir} closed the session before it stood")
        message = arrival.message
        if isinstance(message, wire_session.Welcome):
            return message, arrival.fd
        if arrival.fd is not None:
            os.close(arrival.fd)
        if isinstance(message, wire_session.Refused):
            if message.code == VersionMismatch.code:
                raise VersionMismatch(
                    f"the daemon speaks protocol {message.protocol_min} to {message.protocol_max}, this client "
                    f"{PROTOCOL_MIN} to {PROTOCOL_MAX} ({message.message})"
                )
            raise from_wire(message.code, message.message)
        raise ConnectionFailed(f"the daemon in {runtime_dir} greeted with {type(message).__name__}")

    def fileno(self) -> int:
        """For pollers; -1 once closed."""
        return self._socket.fileno()

    def receive(self) -> list[Arrival | None]:
        """What has arrived, without waiting; the last one is None once the daemon has ended the session."""
        arrivals: list[Arrival | None] = []
        while self._socket.fileno() >= 0:
            try:
                arrivals.append(self._receive_one())
            except (BlockingIOError, InterruptedError):
                break
            except (OSError, InvalidRequest):
                arrivals.append(None)
            if arrivals[-1] is None:
                break
        return arrivals

    def _receive_one(self) -> Arrival | None:
        datagram, ancillary, _flags, _address = self._socket.recvmsg(
            wire_session.MAX_DATAGRAM_NBYTES,
            socket.CMSG_LEN(_MAX_DESCRIPTORS * _DESCRIPTOR_NBYTES),
            socket.MSG_CMSG_CLOEXEC,
        )
        descriptors: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(data) // _DESCRIPTOR_NBYTES
                descriptors += struct.unpack(f"{count}i", data[: count * _DESCRIPTOR_NBYTES])
        message = None
        try:
            if datagram:
                message = wire_session.decode_from_daemon(datagram)
        finally:
            # One at most belongs to a message; without one all are ours to close.
            for surplus in descriptors[0 if message is None else 1 :]:
                os.close(surplus)
        return None if message is None else Arrival(message, descriptors[0] if descriptors else None)

    def send(self, message: wire_session.SegmentClosed | wire_session.Farewell, *, wait_s: float) -> bool:
        """Whether it has left, or need not: the session may be over. Waits so long for a daemon that does not read."""
        datagram = wire_session.encode(message)
        for attempt in range(2):
            try:
                self._socket.send(datagram, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                if not attempt:
                    self._await_room(wait_s)
            except OSError:
                return True
            else:
                return True
        return False

    def _await_room(self, wait_s: float) -> None:
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLOUT)
            poll.poll(wait_s * 1000)

    def close(self) -> None:
        """Ends the session: the daemon takes everything back. Idempotent, from any thread."""
        self._socket.close()
        with contextlib.suppress(IndexError):
            # Taken out before it is closed, in one step: the number may soon be another file's.
            os.close(self._control_page_fds.pop())


def _hello(label: str) -> wire_session.Hello:
    return wire_session.Hello(
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        client_version=__version__,
        pid_namespace=pid_namespace(),
        label=label,
    )
