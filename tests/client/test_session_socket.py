"""The client's end of the session socket, and the end of a session, told by a daemon of the test's own."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest

import kvd_client
from kvd.errors import ConnectionFailed, DaemonRestarted, DaemonUnavailable, KvdError, PermissionRefused
from kvd.protocol import session as wire
from kvd_client.memory.attendant import attendant
from kvd_client.session import link as link_module
from kvd_client.session import session_socket
from kvd_client.session.session_socket import SessionSocket
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL

if TYPE_CHECKING:
    from _typeshed import TraceFunction

WELCOME = wire.Welcome(1, "test", epoch=7, session=3, token=bytes(32), credits=4)
REFUSED = wire.Refused(PermissionRefused.code, "not you", 1, 1)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / wire.SESSION_SOCKET))
        listener.listen()
        listener.settimeout(10)
        yield listener


class Greeted:
    """A session that stands, and the daemon's end of it."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        ends: list[socket.socket] = []

        def greet() -> None:
            ends.append(listener.accept()[0])
            with open("/dev/null", "rb") as page:
                socket.send_fds(ends[0], [wire.encode(WELCOME)], [page.fileno()])

        thread = threading.Thread(target=greet)
        thread.start()
        self.client = SessionSocket(folder, label="", timeout_s=10)
        thread.join()
        self.daemon = ends[0]


@pytest.fixture
def greeted(tmp_path: Path, listener: socket.socket) -> Iterator[Greeted]:
    greeted = Greeted(tmp_path, listener)
    yield greeted
    greeted.client.close()
    greeted.daemon.close()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("datagram", [b"\xc1 not a message", b""])
def test_descriptors_beside_what_is_no_message_are_closed(greeted: Greeted, datagram: bytes) -> None:
    before = num_descriptors()
    with open("/dev/null", "rb") as null:
        socket.send_fds(greeted.daemon, [datagram], [null.fileno()] * 3)
    assert greeted.client.receive() == [None]
    assert num_descriptors() == before


def test_a_descriptor_is_closed_once_however_often_the_socket_is(
    greeted: Greeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close
    closed: list[int] = []

    def close_and_meet_another(fd: int) -> None:
        # As if another thread came here in the midst of the first call.
        if not closed:
            closed.append(fd)
            greeted.client.close()
            close(fd)
        else:
            closed.append(fd)

    monkeypatch.setattr("kvd_client.session.session_socket.os.close", close_and_meet_another)
    greeted.client.close()
    assert len(closed) == 1


def refusal(folder: Path, listener: socket.socket, refuse: Callable[[socket.socket], None]) -> KvdError:
    """What `connect` raises where the daemon does so with the accepted socket."""

    def serve() -> None:
        with listener.accept()[0] as session:
            refuse(session)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(KvdError) as raised:
            kvd_client.connect(folder, timeout_s=10)
    finally:
        thread.join()
    return raised.value


def test_a_refusal_is_read_though_the_hello_came_too_late(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()
    hello = session_socket._hello

    def hello_at_last(label: str) -> wire.Hello:
        assert closed.wait(10)
        return hello(label)

    def refuse(session: socket.socket) -> None:
        session.send(wire.encode(REFUSED))
        session.close()
        closed.set()

    monkeypatch.setattr(session_socket, "_hello", hello_at_last)
    error = refusal(tmp_path, listener, refuse)
    assert isinstance(error, PermissionRefused)
    assert "not you" in str(error)


def test_a_refusal_is_read_though_the_hello_was_not(tmp_path: Path, listener: socket.socket) -> None:
    def refuse(session: socket.socket) -> None:
        session.settimeout(10)
        assert session.recv(1, socket.MSG_PEEK)
        session.send(wire.encode(REFUSED))

    assert isinstance(refusal(tmp_path, listener, refuse), PermissionRefused)


def test_a_daemon_that_closes_without_a_word_is_unavailable(tmp_path: Path, listener: socket.socket) -> None:
    def refuse(session: socket.socket) -> None:
        session.settimeout(10)
        assert session.recv(1, socket.MSG_PEEK)

    assert isinstance(refusal(tmp_path, listener, refuse), DaemonUnavailable)


@pytest.mark.parametrize(
    "told", [ConnectionResetError, BrokenPipeError, ConnectionRefusedError, ConnectionAbortedError]
)
@pytest.mark.parametrize("at", ["_connect", "_greeting"])
@pytest.mark.usefixtures("listener")
def test_a_daemon_that_goes_is_unavailable_however_the_kernel_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, told: type[ConnectionError]
) -> None:
    def tell(*_arguments: object) -> None:
        raise told("the kernel's word")

    monkeypatch.setattr(SessionSocket, at, tell)
    with pytest.raises(DaemonUnavailable, match="ended as this client connected") as raised:
        SessionSocket(tmp_path, label="", timeout_s=10)
    assert isinstance(raised.value.__cause__, told)


@pytest.mark.parametrize("num_lines", range(1, 7))
def test_a_link_is_lost_once_though_another_comes_in_between_two_lines(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch, num_lines: int
) -> None:
    link, told, left = client._runner.link, [], num_lines
    monkeypatch.setattr(link, "when_lost", lambda: told.append(link.lost))

    def follow(frame: FrameType, event: str, _argument: object) -> TraceFunction | None:
        nonlocal left
        if frame.f_code.co_filename == link_module.__file__:
            left -= event == "line"
            if not left:
                left = -1
                link.lose(DaemonRestarted("as from a finalizer, or another thread"))
            return follow
        return None

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        link.lose(DaemonRestarted("the first to come"))
    finally:
        sys.settrace(before)
    assert told == [link.lost]
    assert isinstance(link.lost, DaemonRestarted)


@host_only("no descriptor comes with a segment on a card")
def test_a_descriptor_that_finds_no_room_ends_the_session_at_once(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    assert cache.match(range(100)) == 0  # it is open
    limits, lowest_free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(ConnectionFailed, match="no file descriptor left"):
            cache.sequence(range(100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with cache.sequence(range(100)) as sequence:  # in another session
        assert sequence.num_cached_tokens == 0


def test_a_close_that_the_daemon_does_not_read_is_kept_for_later_and_never_blocks(greeted: Greeted) -> None:
    closed = wire.SegmentClosed(pool=1, segment=2)
    assert isinstance(wire.decode_from_client(greeted.daemon.recv(1000)), wire.Hello)
    num_sent = 0
    while greeted.client.send(closed, wait_s=0):
        num_sent += 1
        assert num_sent < 100_000
    for _ in range(num_sent):
        assert wire.decode_from_client(greeted.daemon.recv(1000)) == closed
    assert greeted.client.send(closed, wait_s=10)
    # Nobody is left to be told.
    greeted.daemon.close()
    assert greeted.client.send(closed, wait_s=0)
    greeted.client.close()
    assert greeted.client.send(closed, wait_s=0)


def test_a_confirmation_is_sent_when_there_is_room_again(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, sent, answers = client._runner.link, [], iter([False, False, True])

    def send(message: wire.SegmentClosed, *, wait_s: float) -> bool:
        sent.append(message)
        return next(answers)

    monkeypatch.setattr(link.session, "send", send)
    attendant()._start()
    closed = wire.SegmentClosed(pool=1, segment=2)
    link._confirm(closed)
    while len(sent) < 3:
        assert attendant().settle(10)
    assert sent == [closed] * 3
