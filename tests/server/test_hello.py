"""The session socket up to the welcome, and what may not be said on it."""

from __future__ import annotations

import mmap
import os
import pickle
import socket

import pytest

import kvd
from kvd.protocol.control_page import ControlPageReader, DaemonState
from kvd.protocol.session import Goodbye, Hello, Refused, SegmentClosed, Welcome, decode_from_daemon, encode
from tests.support.daemon import running_daemon
from tests.support.raw_client import RawClient
from tests.support.wait import eventually


def test_the_welcome_brings_a_token_and_a_read_only_control_page(daemon):
    with RawClient(daemon.folder) as raw:
        assert isinstance(raw.answer, Welcome)
        assert raw.answer.daemon_version == kvd.__version__
        assert len(raw.answer.token) == 32
        [descriptor] = raw.descriptors
        with ControlPageReader(descriptor) as page:
            assert page.epoch == raw.epoch
            assert page.pid == daemon.pid
            first = page.read()
            assert first.state is DaemonState.SERVING
            eventually(lambda: page.read().heartbeat_s > first.heartbeat_s)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize(("lowest", "highest"), [(2, 9), (0, 0), (-5, -1)])
def test_no_common_version_is_refused_naming_both(daemon, lowest, highest):  # case F3
    with RawClient(daemon.folder, hello=encode(Hello(lowest, highest, client_version="7.7"))) as raw:
        assert isinstance(raw.answer, Refused)
        assert raw.answer.code == "version-mismatch"
        assert "7.7" in raw.answer.message
        assert kvd.__version__ in raw.answer.message
        assert f"{lowest} to {highest}" in raw.answer.message
        assert raw.next_datagram() is None


def test_a_newer_client_that_still_speaks_ours_is_welcome(daemon):
    with RawClient(daemon.folder, hello=encode(Hello(1, 99))) as raw:
        assert isinstance(raw.answer, Welcome)
        assert raw.answer.protocol == 1


@pytest.mark.parametrize(
    "datagram",
    [
        b"\xff",
        os.urandom(4000),
        b"x" * 20_000,
        pickle.dumps({"pid": 1}),
        b"\x81" * 5000,
        encode(Goodbye("a", "b")),
        encode(SegmentClosed(0, 0)),
    ],
    ids=["one byte", "random", "too long", "pickle", "nested", "another message", "a close"],
)
def test_anything_but_a_hello_is_refused(daemon, datagram):  # case F3
    with RawClient(daemon.folder, hello=datagram) as raw:
        assert isinstance(raw.answer, Refused)
        assert raw.answer.code == "invalid-request"
        assert raw.next_datagram() is None


def test_a_second_datagram_ends_the_session(daemon):
    with RawClient(daemon.folder) as raw, RawClient(daemon.folder) as observer:
        raw.session_socket.send(encode(Hello(1, 1)))
        goodbye = raw.next_datagram()
        assert isinstance(goodbye, Goodbye)
        assert goodbye.code == "invalid-request"
        assert raw.next_datagram() is None
        assert len(observer.status().clients) == 1


def test_closing_a_segment_that_was_never_granted_is_counted_and_ends_nothing(daemon):
    with RawClient(daemon.folder) as raw:
        for pool, segment in [(0, 0), (-1, 1 << 62), (1 << 62, -1)]:
            raw.session_socket.send(encode(SegmentClosed(pool, segment)))
        eventually(lambda: raw.counter("unexpected_closes") == 3)


def test_what_an_ending_client_had_still_said_does_not_hide_its_end(daemon):
    with RawClient(daemon.folder) as raw, RawClient(daemon.folder) as observer:
        for _ in range(10):
            raw.session_socket.send(encode(SegmentClosed(0, 0)))
        raw.session_socket.close()
        eventually(lambda: len(observer.status().clients) == 1)
        assert observer.counter("num_sessions_expelled") == 0


def test_descriptors_sent_by_a_client_are_not_taken(daemon):
    with RawClient(daemon.folder) as observer:
        observer.status()
        num_before = daemon.num_descriptors()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, open(os.devnull) as null:
            peer.connect(str(daemon.folder / "session.sock"))
            socket.send_fds(peer, [encode(Hello(1, 1))], [null.fileno()] * 50)
            peer.recv(4096)
        eventually(lambda: daemon.num_descriptors() <= num_before)
        assert len(observer.status().clients) == 1


def test_silent_connections_do_not_keep_others_out(daemon):
    silent = []
    for _ in range(40):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(daemon.folder / "session.sock"))
        silent.append(connection)
    with RawClient(daemon.folder) as raw:
        assert raw.counter("num_hello_timeouts") >= 40 - 16
        for connection in silent[:10]:
            assert isinstance(decode_from_daemon(connection.recv(4096)), Refused)
    for connection in silent:
        connection.close()


def test_sessions_are_bounded(tmp_path):
    with running_daemon(tmp_path, limits={"sessions": 4}) as daemon:
        clients = [RawClient(daemon.folder, connect=False) for _ in range(4)]
        with RawClient(daemon.folder) as refused:
            assert isinstance(refused.answer, Refused)
            assert refused.answer.code == "overloaded"
            assert "limits.sessions" in refused.answer.message
        clients.pop().close()
        eventually(lambda: _is_welcome(daemon.folder))
        for client in clients:
            client.close()


def _is_welcome(folder):
    with RawClient(folder, connect=False) as raw:
        return isinstance(raw.answer, Welcome)


def test_what_a_client_claims_is_shown_without_control_characters(daemon):
    with RawClient(daemon.folder, label="a\x1b[31m\nb" + "c" * 1000) as raw:
        [client] = raw.status().clients
        assert client.label.startswith("a[31mbc")
        assert len(client.label) <= 128


def test_200_sessions_leave_no_descriptor_behind(daemon):
    with RawClient(daemon.folder) as observer:
        for _ in range(20):
            RawClient(daemon.folder).close()
        eventually(lambda: len(observer.status().clients) == 1)
        num_before = daemon.num_descriptors()
        for _ in range(200):
            with RawClient(daemon.folder) as raw:
                raw.status()
        eventually(lambda: len(observer.status().clients) == 1)
        eventually(lambda: daemon.num_descriptors() <= num_before)
