"""A socket for large transfers: as few system calls as can be, each with the interpreter lock released all the way.

A plain socket stays in blocking mode and has its time-outs in the kernel (SO_RCVTIMEO, SO_SNDTIMEO): one sendmsg takes
header and block from where they lie, one recv with MSG_WAITALL fills the block's own memory. Python's own time-outs
would make the socket non-blocking, and a 2 MiB value some twenty poll and recv calls, with the lock taken between them.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from kvd.tiers.redis_url import Node, RedisAddress

Buffer = bytes | bytearray | memoryview


class BulkSocket(Protocol):
    """What `RespConnection` needs. Every call raises `TimeoutError` or another `OSError`; then only `close` is left."""

    def set_timeout(self, seconds: float) -> None:
        """Bounds each later call."""

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all parts, wholly, without joining them first."""

    def receive(self, view: memoryview, *, fill: bool) -> int:
        """Receive into `view`: all of it with `fill`, else what there is. 0 means that the other side closed."""

    def is_idle(self) -> bool:
        """Whether it is open with nothing to read: else it must not be used again."""

    def close(self) -> None:
        """Idempotent."""


class PlainSocket:
    """A unix or TCP socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._timeout_s = 0.0

    def set_timeout(self, seconds: float) -> None:
        """As in `BulkSocket`; twice this at most for one call that makes progress."""
        if seconds != self._timeout_s:
            whole = int(seconds)
            timeval = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            self._timeout_s = seconds

    def send(self, parts: Sequence[Buffer]) -> None:
        """As in `BulkSocket`."""
        deadline_s = time.monotonic() + self._timeout_s
        left = [memoryview(part).cast("B") for part in parts]
        while left:
            try:
                count = self._sock.sendmsg(left)
            except BlockingIOError as error:
                raise TimeoutError("sending took too long") from error
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
                _check_deadline(deadline_s)

    def receive(self, view: memoryview, *, fill: bool) -> int:
        """As in `BulkSocket`."""
        deadline_s = time.monotonic() + self._timeout_s
        done = 0
        while done < len(view):
            try:
                count = self._sock.recv_into(view[done:], 0, socket.MSG_WAITALL if fill else 0)
            except BlockingIOError as error:
                raise TimeoutError("the answer took too long") from error
            done += count
            if count == 0:
                return 0
            if not fill:
                break
            if done < len(view):
                _check_deadline(deadline_s)
        return done

    def is_idle(self) -> bool:
        """As in `BulkSocket`."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """As in `BulkSocket`."""
        self._sock.close()


class TlsSocket:
    """A TLS connection: one copy through the cipher more, and Python's time-outs."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def set_timeout(self, seconds: float) -> None:
        """As in `BulkSocket`."""
        self._sock.settimeout(seconds)

    def send(self, parts: Sequence[Buffer]) -> None:
        """As in `BulkSocket`."""
        for part in parts:
            self._sock.sendall(part)

    def receive(self, view: memoryview, *, fill: bool) -> int:
        """As in `BulkSocket`."""
        deadline_s = time.monotonic() + (self._sock.gettimeout() or 0.0)
        done = 0
        while done < len(view):
            count = self._sock.recv_into(view[done:])
            done += count
            if count == 0:
                return 0
            if not fill:
                break
            _check_deadline(deadline_s)
        return done

    def is_idle(self) -> bool:
        """As in `BulkSocket`. TLS has records of its own to read, so only decrypted bytes and closure count."""
        timeout_s = self._sock.gettimeout()
        self._sock.settimeout(0.0)
        try:
            self._sock.recv(1)
        except (ssl.SSLWantReadError, BlockingIOError):
            return True
        except OSError:
            return False
        finally:
            self._sock.settimeout(timeout_s)
        return False

    def close(self) -> None:
        """As in `BulkSocket`."""
        self._sock.close()


def connect(node: Node, address: RedisAddress, *, timeout_s: float) -> BulkSocket:
    """Connect to one node, TLS included. Raises `OSError`."""
    if address.is_unix:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.settimeout(timeout_s)
            unix.connect(node.host)
        except BaseException:
            unix.close()
            raise
        return PlainSocket(unix)
    tcp = socket.create_connection((node.host, node.port), timeout=timeout_s)
    try:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return PlainSocket(tcp)
        return TlsSocket(_tls_context(address).wrap_socket(tcp, server_hostname=node.host))
    except BaseException:
        tcp.close()
        raise


def _tls_context(address: RedisAddress) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=address.ca_file or None)
    if address.cert_file:
        context.load_cert_chain(address.cert_file, address.key_file)
    return context


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise TimeoutError("a transfer took too long")
