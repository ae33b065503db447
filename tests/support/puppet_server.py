"""A server that speaks just enough to be mistaken for a Redis, or nothing of the sort."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


def always(answer: bytes) -> Callable[[bytes], bytes]:
    """The same answer to whatever is said."""
    return lambda request: answer


def claiming(info: str) -> Callable[[bytes], bytes]:
    """Answers every command of a pipeline with this INFO text."""
    bulk = f"${len(info)}\r\n{info}\r\n".encode()
    return lambda request: bulk * max(1, request.count(b"*"))


@contextlib.contextmanager
def puppet_server(answer: Callable[[bytes], bytes] | None) -> Iterator[str]:
    """The URL of a server that gives `answer(request)`; with None it listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                links.append(link)
                if answer is not None:
                    threading.Thread(target=talk, args=(link, answer), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for link in links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()


def talk(link: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while request := link.recv(65536):
            link.sendall(answer(request))
