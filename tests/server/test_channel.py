"""Channel: ordered, never blocking, and careful with descriptors."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvd.server import channel as channel_module
from kvd.server.channel import Channel


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(5)
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def fill(channel):
    """Sends until the client's side is full; how many left."""
    num_sent = 0
    while not channel.is_blocked:
        channel.send(b"%d" % num_sent)
        num_sent += 1
    return num_sent - 1


def test_what_does_not_fit_waits_and_leaves_in_order(pair):
    channel, theirs = pair
    num_sent = fill(channel)
    channel.send(b"last")
    for index in range(num_sent):
        assert theirs.recv(100) == b"%d" % index
    assert channel.flush()
    assert theirs.recv(100) == b"%d" % num_sent
    assert theirs.recv(100) == b"last"


def test_a_grant_that_waits_keeps_its_own_descriptor(pair):
    channel, theirs = pair
    num_sent = fill(channel)
    before = set(Path("/proc/self/fd").iterdir())
    descriptor = os.memfd_create("granted")
    os.write(descriptor, b"the segment")
    channel.send(b"grant", descriptor, is_grant=True)
    os.close(descriptor)  # the segment is gone, and its number may be another's
    assert channel.num_grants == 1
    assert channel.num_grants_sent == 0
    for _ in range(num_sent):
        theirs.recv(100)
    assert channel.flush()
    assert channel.num_grants_sent == 1
    theirs.recv(100)
    datagram, [received], _, _ = socket.recv_fds(theirs, 100, 1)
    assert datagram == b"grant"
    assert os.pread(received, 100, 0) == b"the segment"
    os.close(received)
    # What it kept meanwhile is closed once it was sent.  # case D6
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_client_that_never_reads_is_noticed(pair):
    channel, _ = pair
    fill(channel)
    for _ in range(channel_module.MAX_PENDING - 1):
        channel.send(b"more")
        assert not channel.is_overfull
    channel.send(b"too much")
    assert channel.is_overfull


def test_closing_forgets_the_duplicates(pair):
    channel, _ = pair
    fill(channel)
    num_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with open(os.devnull) as null:
        for _ in range(10):
            channel.send(b"grant", null.fileno())
    channel.close()
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == num_before - 1  # noqa: PTH208


def test_a_peer_that_is_gone_is_no_error(pair):
    channel, theirs = pair
    theirs.close()
    channel.send(b"anybody there?")
    assert not channel.is_blocked
    assert channel.receive() == b""


def test_the_last_word_is_readable_although_the_client_had_said_something(pair):
    channel, theirs = pair
    theirs.send(b"something unasked")
    channel.send(b"goodbye")
    channel.close()
    assert theirs.recv(100) == b"goodbye"
    assert theirs.recv(100) == b""
