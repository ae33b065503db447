"""The sockets' files, and a start that fails over them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from kvd.errors import RuntimeFolderError
from kvd.server import server as server_module
from kvd.server.counters import ServerCounters
from kvd.server.endpoints import Endpoints, SocketAccess, check_socket_path
from kvd.server.limits import Limits
from kvd.server.lobby import Lobby
from kvd.server.router import bind_router
from kvd.server.watch import Watch
from tests.service.harness import House

NOT_UTF8 = Path(os.fsdecode(b"/run/\xff"))


def endpoints(folder: Path) -> Endpoints:
    return Endpoints(
        folder,
        SocketAccess(),
        credits=8,
        admit=lambda _address: False,
        welcome=lambda _process: False,
        counters=ServerCounters(),
    )


def test_closing_removes_both_sockets(tmp_path: Path):
    one = endpoints(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    one.close()
    one.close()
    assert not list(tmp_path.iterdir())


def test_closing_leaves_the_sockets_of_a_successor(tmp_path: Path):
    one = endpoints(tmp_path)
    successor = endpoints(tmp_path)
    one.close()
    assert {path.name for path in tmp_path.iterdir()} == {"session.sock", "requests.sock"}
    successor.close()
    assert not list(tmp_path.iterdir())


def test_a_closed_lobby_lets_nobody_in_while_the_socket_is_still_there(tmp_path: Path):
    one, watch = endpoints(tmp_path), Watch()
    lobby = Lobby(one.listener, watch, ServerCounters(), lambda *_: None, lambda: 0.0)
    lobby.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late, pytest.raises(ConnectionRefusedError):
        late.connect(str(one.session_path))
    assert one.listener.fileno() >= 0
    one.close()
    watch.close()
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_not_utf8_is_refused():
    with pytest.raises(RuntimeFolderError, match="not UTF-8"):
        check_socket_path(NOT_UTF8 / "requests.sock")


def test_a_daemon_whose_folder_is_not_utf8_ends_at_once(tmp_path: Path):
    command = [sys.executable, "-m", "kvd.cli", "serve", "--runtime-dir", os.fsencode(tmp_path) + b"/\xff"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 8, done.stderr
    assert "not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_router_that_cannot_be_bound_does_not_keep_the_context_alive():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(UnicodeEncodeError):
        bind_router(context, str(NOT_UTF8), credits=8)
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()


@pytest.mark.parametrize("part", ["Watch", "Sender", "Lobby", "MemoryGuard"])
def test_a_server_that_cannot_be_made_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str):
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(server_module, part, fails)
    with pytest.raises(OSError, match="Too many open files"):
        server_module.Server(
            House().service,
            folder=tmp_path,
            access=SocketAccess(),
            control_page_fd=-1,
            epoch=1,
            version="",
            limits=Limits(credits=8, sessions=8),
        )
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
