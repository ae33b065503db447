"""Running out of file descriptors: refused, never fatal."""

from __future__ import annotations

import contextlib
import resource
import socket

import pytest

from kvd.protocol.session import Refused, Welcome
from tests.support.raw_client import RawClient
from tests.support.wait import eventually


@pytest.mark.parametrize(
    ("name", "kind"), [("requests.sock", socket.SOCK_STREAM), ("session.sock", socket.SOCK_SEQPACKET)]
)
def test_connections_without_end_do_not_exhaust_the_daemon(daemon, name, kind):  # case F8
    with RawClient(daemon.folder) as observer, contextlib.ExitStack() as closing:
        observer.status()
        num_before = daemon.num_descriptors()
        limit = num_before + 1000
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(4000):
            connection = closing.enter_context(socket.socket(socket.AF_UNIX, kind))
            connection.settimeout(5)
            with contextlib.suppress(BlockingIOError):  # the kernel's queue of new connections is full
                connection.connect(str(daemon.folder / name))
            assert daemon.is_alive, daemon.log()
        observer.check()
        # Even while they are all open, nearly none of them holds a descriptor of the daemon's.
        eventually(lambda: daemon.num_descriptors() < num_before + 50)
    with RawClient(daemon.folder) as raw:
        raw.check()


def test_a_daemon_short_of_descriptors_says_so(daemon):
    with RawClient(daemon.folder) as observer, contextlib.ExitStack() as clients:
        observer.status()
        limit = daemon.num_descriptors() + 60
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        answers = [clients.enter_context(RawClient(daemon.folder, connect=False)).answer for _ in range(40)]
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert refused
        assert all("LimitNOFILE" in answer.message for answer in refused)
        assert any(isinstance(answer, Welcome) for answer in answers)
        observer.check()
