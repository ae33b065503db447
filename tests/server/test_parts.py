"""The small pure parts of the server."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.block import SessionId
from kvd.errors import InvalidRequest
from kvd.protocol import wire
from kvd.protocol.requests import Status
from kvd.server.channel import Channel
from kvd.server.guard import GROWTH_NBYTES, NUM_LOOKS, MemoryGuard
from kvd.server.kernel import PeerCredentials, open_pidfd, parse_peer_address, peer_credentials
from kvd.server.lingering import LINGER_S, Lingering
from kvd.server.salvage import request_id_of
from kvd.server.sessions import ADMISSIONS_PER_SESSION, MAX_TOMBSTONES, Session, Sessions
from kvd.server.watch import Watch
from tests.support.clock import FakeClock

PEER = PeerCredentials(pid=10, uid=20, gid=30)


def test_a_peer_address_names_pid_uid_and_gid():
    assert PEER.peer_address == "localhost:20:30:10"
    assert parse_peer_address(PEER.peer_address) == PEER


@pytest.mark.parametrize(
    "text", ["", "None", "127.0.0.1", "localhost:1:2", "localhost:1:2:x", "localhost:1:2:-3", "a:²:1:1"]
)
def test_another_peer_address_names_nobody(text):
    assert parse_peer_address(text) is None


def test_a_pidfd_is_readable_when_the_process_ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_credentials(ours).pid == os.getpid()
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        pidfd = os.pidfd_open(child.pid)
        own = open_pidfd(ours, peer_credentials(ours))
        assert not select.select([pidfd, own], [], [], 0)[0]
        child.communicate()
        assert select.select([pidfd, own], [], [], 5)[0] == [pidfd]
        os.close(pidfd)
        os.close(own)


@given(st.integers(0, 2**64 - 1), st.text(max_size=10), st.lists(st.integers(), max_size=3))
def test_a_request_id_is_found_in_what_is_no_request(request_id, tag, rest):
    frame = b"KV\x09" + msgspec.msgpack.encode([tag, request_id, *[value % 2**63 for value in rest]])
    assert request_id_of(frame) == request_id


@pytest.mark.parametrize("request_id", [0, 2**63 - 1])
def test_every_request_id_of_the_protocol_page_is_taken(request_id):
    assert wire.decode_request(wire.encode(Status(request_id, 1))).request_id == request_id


@pytest.mark.parametrize("request_id", [-1, 2**63, 2**64 - 1])
def test_another_request_id_is_no_request(request_id):
    with pytest.raises(InvalidRequest):
        wire.decode_request(wire.encode(Status(request_id, 1)))


@given(st.binary(max_size=200))
def test_salvaging_never_raises(garbage):
    for frame in (garbage, b"KV\x01" + garbage, b"KV\x01\x93\xa4" + garbage):
        request_id_of(frame)


def session(number: int, peer: PeerCredentials = PEER) -> Session:
    return Session(SessionId(number), Sessions.new_token(), peer, Channel(socket.socket()), None)


def test_a_token_is_dead_with_its_session():
    sessions = Sessions()
    sessions.add(one := session(1))
    assert sessions.by_token[one.token] is one
    sessions.remove(one)
    one.channel.close()
    assert one.token not in sessions.by_token
    assert sessions.was_ended(one.token)
    assert not sessions.admit(PEER.peer_address)


def test_tombstones_are_bounded():
    sessions = Sessions()
    first = session(0)
    for one in [first, *(session(number) for number in range(1, MAX_TOMBSTONES + 1))]:
        sessions.add(one)
        sessions.remove(one)
        one.channel.close()
    assert not sessions.was_ended(first.token)


def test_admissions_are_counted_by_process():
    sessions = Sessions()
    assert not sessions.admit(PEER.peer_address)
    sessions.add(one := session(1))
    assert [sessions.admit(PEER.peer_address) for _ in range(ADMISSIONS_PER_SESSION + 1)].count(True) == 4
    assert not sessions.admit("localhost:20:30:11")
    assert not sessions.admit("garbage")
    one.channel.close()


def test_a_process_that_changes_its_group_stays_itself():
    one = session(1)
    assert one.is_peer("localhost:20:99:10")
    assert one.is_peer("localhost:20:99:10")
    assert one.is_peer("localhost:20:30:10")
    assert not one.is_peer("localhost:21:30:10")
    assert not one.is_peer("localhost:20:30:11")
    assert not one.is_peer("None")
    one.channel.close()


def test_an_event_of_a_closed_descriptor_is_not_its_successors():
    watch, heard = Watch(), []
    first, second = os.pipe(), os.pipe()
    os.write(first[1], b"x")
    os.write(second[1], b"x")

    def replace(mine, other):
        """Closes the other and lets a new pipe take its number, before its event is served."""
        heard.append(mine[0])
        watch.remove(other[0])
        third = os.pipe()
        os.dup2(third[0], other[0])
        watch.add(other[0], lambda: heard.append("successor"))
        os.close(third[0])
        os.close(third[1])

    watch.add(first[0], lambda: replace(first, second))
    watch.add(second[0], lambda: replace(second, first))
    watch.dispatch()
    assert len(heard) == 1
    watch.close()
    for descriptor in {*first, *second}:
        os.close(descriptor)


class Memory:
    """A guard's surroundings."""

    def __init__(self) -> None:
        self.nbytes, self.senders = 100 << 20, set()
        self.num_given_back = 0
        self.guard = MemoryGuard(
            "", memory=lambda: self.nbytes, senders=lambda _: set(self.senders), give_back=self.give_back
        )

    def give_back(self):
        self.num_given_back += 1


GOOD, BAD = (1, 0), (2, 0)


def test_who_only_sends_while_memory_grows_is_sent_away():
    memory = Memory()
    memory.senders = {GOOD, BAD}
    assert not memory.guard.look({GOOD: 1, BAD: 1})
    memory.nbytes += GROWTH_NBYTES + 1
    looks = [memory.guard.look({GOOD: 2 + turn, BAD: 1}) for turn in range(NUM_LOOKS)]
    assert looks == [set(), set(), {BAD}]
    memory.guard.look({})
    assert memory.num_given_back == 1


def test_growth_with_nobody_to_blame_is_accepted():
    memory = Memory()
    memory.nbytes += GROWTH_NBYTES + 1
    assert not memory.guard.look({GOOD: 1})
    memory.senders = {GOOD}
    assert [memory.guard.look({GOOD: 1}) for _ in range(10)] == [set()] * 10
    assert memory.num_given_back == 0


def test_who_completes_a_message_now_and_then_is_not_the_culprit():
    memory = Memory()
    memory.nbytes += GROWTH_NBYTES + 1
    memory.senders = {GOOD}
    assert [memory.guard.look({GOOD: turn // 2}) for turn in range(6)] == [set()] * 6


def test_a_session_lingers_until_its_process_is_gone():
    clock, told = FakeClock(), []
    watch = Watch()
    lingering = Lingering(
        watch,
        overdue=lambda session: told.append(("overdue", session)),
        gone=lambda session: told.append(("gone", session)),
        clock=clock,
    )
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    pidfds = [os.pidfd_open(child.pid) for child in children]
    for number, (child, pidfd) in enumerate(zip(children, pidfds, strict=True)):
        lingering.add(SessionId(number), PEER._replace(pid=child.pid), pidfd)
        clock.advance(1)
    assert (len(lingering), lingering.num_of_uid(20), lingering.num_of_uid(21)) == (3, 3, 0)
    assert lingering.num_of_process(PEER._replace(pid=children[0].pid)) == 1
    children[0].communicate()
    watch.dispatch()
    assert told == [("gone", 0)]
    assert lingering.next_deadline_s == 1001.0 + LINGER_S
    clock.advance(LINGER_S - 2)
    lingering.expire(clock())
    lingering.expire(clock())
    assert told == [("gone", 0), ("overdue", 1)]
    assert lingering.next_deadline_s == 1002.0 + LINGER_S
    # It is still waited for.
    children[1].communicate()
    watch.dispatch()
    assert told[2:] == [("gone", 1)]
    lingering.close()
    assert not len(lingering)
    children[2].communicate()
    watch.dispatch()
    assert told[3:] == []
    for pidfd in pidfds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)
    watch.close()
