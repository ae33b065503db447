"""The endpoint: HTTP on a thread of its own, which asks the loop for figures only while somebody fetches them.

    exporter.offer(snapshot)  the loop, at a heartbeat, when `exporter.is_wanted`
    GET /metrics              the text of the last one offered, which is fetched anew for each request

Not covered: TLS and authentication; a loopback port or a socket's mode is the wall.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from kvd.errors import ConfigError, RuntimeFolderError
from kvd.metrics.address import Address
from kvd.status import Snapshot

FRESH_S = 0.5
"""Figures of this age are served again instead of asking the loop."""
PATIENCE_S = 2.0
"""How long a request waits for the loop, before it gets the last figures with their age."""
CLIENT_TIMEOUT_S = 5.0
"""How long one scraper may take to ask or to read."""


class Exporter:
    """Serves until `close`. `offer` and `is_wanted` are for the loop and never block it."""

    def __init__(
        self,
        address: Address,
        *,
        mode: int = 0o600,
        gid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds; `mode` and `gid` are of a unix socket.

        Raises `ConfigError` when prometheus-client is not installed, `RuntimeFolderError` when the address is taken or
        may not be bound.
        """
        try:
            from kvd.metrics.exposition import CONTENT_TYPE, exposition
        except ImportError as error:
            raise ConfigError("metrics.listen needs prometheus-client: pip install 'kvd-daemon[metrics]'") from error
        self._clock = clock
        self._wanted = threading.Event()
        self._offered = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._offered_at_s = 0.0
        self._path: Path | None = None
        self._inode = 0

        def page() -> tuple[str, bytes] | None:
            snapshot, age_s = self._latest()
            return None if snapshot is None else (CONTENT_TYPE, exposition(snapshot, age_s))

        try:
            self._server = _bind(address, _handler(page))
            if address.path is not None:
                self._guard(address.path, mode, gid)
        except OSError as error:
            raise RuntimeFolderError(f"metrics cannot be served on {address}: {error.strerror or error}") from error
        self.address = Address(address.host, self._server.server_address[1]) if not address.path else address
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvd-metrics", daemon=True)
        self._thread.start()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for new figures."""
        return self._wanted.is_set()

    def offer(self, snapshot: Snapshot) -> None:
        """The figures of this moment."""
        self._wanted.clear()
        with self._offered:
            self._snapshot, self._offered_at_s = snapshot, self._clock()
            self._offered.notify_all()

    def close(self) -> None:
        """Ends the thread and removes the socket. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                # Another daemon may have put its own there.
                if path.stat().st_ino == self._inode:
                    path.unlink()

    def _latest(self) -> tuple[Snapshot | None, float]:
        with self._offered:
            if self._snapshot is None or self._clock() - self._offered_at_s > FRESH_S:
                asked_at_s = self._clock()
                self._wanted.set()
                self._offered.wait_for(lambda: self._offered_at_s >= asked_at_s, PATIENCE_S)
            return self._snapshot, max(0.0, self._clock() - self._offered_at_s)

    def _guard(self, path: Path, mode: int, gid: int | None) -> None:
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(mode)
        self._path, self._inode = path, path.stat().st_ino


def _handler(page: Callable[[], tuple[str, bytes] | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S
        server_version, sys_version = "kvd", ""

        def do_GET(self) -> None:
            """Answers /metrics."""
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            made = page()
            if made is None:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
                return
            kind, body = made
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are no news."""

        def address_string(self) -> str:
            """A unix peer has no address."""
            return "local"

    return Handler


class _Server(HTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away half way is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Without the names that HTTPServer looks up."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "kvd", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        """A unix peer's address is empty, where the handler expects a pair."""
        connection, _ = self.socket.accept()
        return connection, ("local", 0)


def _bind(address: Address, handler: type[BaseHTTPRequestHandler]) -> HTTPServer:
    if address.path is None:
        kind = _Server6 if ":" in address.host else _Server
        return kind((address.host, address.port), handler)
    _remove_stale(address.path)
    before = os.umask(0o177)
    try:
        return _UnixServer(str(address.path), handler)  # type: ignore[arg-type]
    finally:
        os.umask(before)


def _remove_stale(path: Path) -> None:
    """A socket that nobody listens on, left by a daemon that was killed."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError:
            return
