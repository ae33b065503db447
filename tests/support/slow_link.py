"""A link to a real Redis that a test can make slow where it matters: while a value is on its way to the daemon.

with slow_link(server) as link, running_daemon(..., tiers={"redis": {"url": link.url}}):
    link.hold(after=1)          # the second fetch of values from now on ...
    link.wait_held()            # ... is under way: a byte comes now and then, so no time-out ends it
    link.release()              # the rest comes at full speed; `link.cut()` breaks the connection instead
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.redis_servers import RealServer

_FETCH = re.compile(rb"GETEX\r\n\$\d+\r\n[^\r]*v:")
_LIMIT_S = 30.0
_TRICKLE_S = 0.05


class SlowLink:
    """Passes everything on, both ways, each connection on a thread of its own."""

    def __init__(self, server: RealServer, folder: Path) -> None:
        self._server = server
        self._path = folder / "s"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self._lock = threading.Lock()
        self._num_to_pass: int | None = None
        """Fetches that still go at full speed; None: all."""
        self._held = threading.Event()
        self._go_on = threading.Event()
        self._is_cut = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self._open: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    def hold(self, *, after: int = 0) -> None:
        with self._lock:
            self._num_to_pass, self._is_cut = after, False
        self._held.clear()
        self._go_on.clear()

    def wait_held(self) -> None:
        assert self._held.wait(_LIMIT_S), "no value was fetched"

    def release(self) -> None:
        with self._lock:
            self._num_to_pass = None
        self._go_on.set()

    def cut(self) -> None:
        self._is_cut = True
        self.release()

    def close(self) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_LIMIT_S)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(near,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far, contextlib.suppress(OSError):
            far.connect(str(self._server.socket_path))
            self._open += [near, far]
            is_slow = False
            while True:
                ready, _, _ = select.select([near, far], [], [])
                if near in ready:
                    request = near.recv(1 << 20)
                    if not request:
                        return
                    is_slow |= bool(_FETCH.search(request)) and self._is_next()
                    far.sendall(request)
                if far in ready:
                    answer = far.recv(1 << 20)
                    if not answer:
                        return
                    if is_slow:
                        is_slow = False
                        answer = self._trickle(near, answer)
                        if self._is_cut:
                            return
                    near.sendall(answer)

    def _is_next(self) -> bool:
        with self._lock:
            if self._num_to_pass is None:
                return False
            self._num_to_pass -= 1
            return self._num_to_pass < 0

    def _trickle(self, near: socket.socket, answer: bytes) -> bytes:
        """Sends a byte now and then until it may go on; what is left of the answer then."""
        self._held.set()
        position = 0
        while not self._go_on.wait(_TRICKLE_S) and position < len(answer) - 1:
            near.sendall(answer[position : position + 1])
            position += 1
        return answer[position:]


@contextlib.contextmanager
def slow_link(server: RealServer) -> Iterator[SlowLink]:
    with tempfile.TemporaryDirectory(prefix="kvd-link-") as folder:
        link = SlowLink(server, Path(folder))
        try:
            yield link
        finally:
            link.close()
