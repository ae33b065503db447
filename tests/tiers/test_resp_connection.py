"""The protocol reader, fed in pieces of every size."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import StateError, TierRefused
from kvd.tiers.bulk_socket import Buffer, PlainSocket
from kvd.tiers.resp_connection import ErrorReply, RespConnection, command


class ScriptedSocket:
    """Gives prepared bytes in prepared pieces."""

    def __init__(self, data: bytes, pieces: Sequence[int]) -> None:
        self.data = data
        self.pieces = list(pieces)
        self.sent = b""

    def set_timeout(self, seconds: float) -> None:
        pass

    def send(self, parts: Sequence[Buffer]) -> None:
        self.sent += b"".join(parts)

    def receive(self, view: memoryview, *, fill: bool) -> int:
        limit = len(view) if fill else min(len(view), self.pieces.pop(0) if self.pieces else len(view))
        piece, self.data = self.data[:limit], self.data[limit:]
        if fill and len(piece) < limit:
            return 0
        view[: len(piece)] = piece
        return len(piece)

    def is_idle(self) -> bool:
        return not self.data

    def close(self) -> None:
        pass


def connection(data: bytes, pieces: Sequence[int] = ()) -> RespConnection:
    return RespConnection(ScriptedSocket(data, pieces), "test")


@given(
    value=st.binary(max_size=9000),
    pieces=st.lists(st.integers(1, 40), max_size=60),
    wanted=st.integers(0, 9000),
)
def test_answers_cut_anywhere_read_the_same(value: bytes, pieces: list[int], wanted: int):
    data = b"+OK\r\n:42\r\n$%d\r\n%s\r\n-ERR no\r\n$-1\r\n$3\r\na\r\n\r\n" % (len(value), value)
    link = connection(data, pieces)
    assert link.read_reply() == b"OK"
    assert link.read_reply() == 42
    assert link.read_value_length() == len(value)
    into = memoryview(bytearray(min(wanted, len(value))))
    link.read_into(into)
    assert into == value[: len(into)]
    link.finish_value()
    assert link.read_reply() == ErrorReply("ERR no")
    assert link.read_value_length() is None
    assert link.read_reply() == b"a\r\n"
    assert link.is_idle()


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"*2\r\n",
        b"$abc\r\n",
        b":\r\n",
        b"\r\n",
        b"+no line end in sight" + b"x" * 5000,
        b"$2000000\r\n" + b"x" * 5002,
        b"+OK\n",
        b"$3\r\nabcde\r\n",
    ],
)
def test_another_protocol_is_refused(data: bytes):
    link = connection(data)
    with pytest.raises(TierRefused) as caught:
        link.read_reply()
    assert caught.value.cause == "not-redis"


def test_a_long_value_where_a_small_one_is_expected_is_read_past():
    link = connection(b"$20000\r\n" + b"x" * 20_000 + b"\r\n$16384\r\n" + b"y" * 16_384 + b"\r\n")
    reply = link.read_reply()
    assert isinstance(reply, ErrorReply)
    assert "20000" in reply.text
    assert link.read_reply() == b"y" * 16_384, "the connection is well"


@pytest.mark.parametrize("data", [b"", b"+O", b"$10\r\n", b"$10\r\nabc", b"$3\r\nabc"])
def test_a_connection_that_ends_early_says_so(data: bytes):
    with pytest.raises(ConnectionResetError):
        connection(data).read_reply()


def test_more_than_the_value_has_is_never_read():
    link = connection(b"$3\r\nabc\r\n+OK\r\n")
    assert link.read_value_length() == 3
    with pytest.raises(StateError, match="3 left"):
        link.read_into(memoryview(bytearray(4)))


def test_a_command_names_the_length_of_each_part():
    assert command(b"GET", b"a\r\nb", b"") == b"*3\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n$0\r\n\r\n"


def test_a_plain_socket_times_out_in_the_kernel_and_sees_the_end():
    ours, theirs = socket.socketpair()
    with theirs:
        sock = PlainSocket(ours)
        sock.set_timeout(0.01)
        into = memoryview(bytearray(100))
        assert sock.is_idle()
        with pytest.raises(TimeoutError):
            sock.receive(into, fill=True)
        theirs.send(b"x" * 60)
        assert not sock.is_idle()
        with pytest.raises(TimeoutError):
            sock.receive(into, fill=True)
        with pytest.raises(TimeoutError):
            sock.send([bytes(16 << 20)])
    assert not sock.is_idle()
    assert sock.receive(into, fill=False) == 0
    sock.close()


def test_parts_are_sent_whole_and_in_order():
    ours, theirs = socket.socketpair()
    with theirs:
        sock = PlainSocket(ours)
        sock.set_timeout(5)
        sock.send([b"head", memoryview(b"body" * 100), b"", b"tail"])
        assert theirs.recv(4096) == b"head" + b"body" * 100 + b"tail"
        sock.close()
