"""Whoever claims to be somebody else gets nothing and harms nobody."""

from __future__ import annotations

import ctypes
import multiprocessing
import struct
import time

import pytest
import zmq

from kvd.protocol import wire
from kvd.protocol.requests import Reserve, Status
from kvd.protocol.session import Hello, Welcome, encode
from tests.support.daemon import running_daemon
from tests.support.raw_client import RawClient, totals
from tests.support.wait import eventually

SPAWN = multiprocessing.get_context("spawn")


def _claim(folder, routing_ids, frame, with_session, reply):
    """In another process: a DEALER for each routing id that sends the frame and waits a little for an answer."""
    context = zmq.Context()
    session = RawClient(folder, connect=False) if with_session else None
    answered, dealers = [], []
    for routing_id in routing_ids:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        if routing_id is not None:
            dealer.routing_id = routing_id
        dealer.connect(f"ipc://{folder}/requests.sock")
        dealer.send(frame)
        dealers.append(dealer)
        # In this order: each has arrived before the next connects.
        answered.append(dealer.poll(500) != 0)
    context.destroy(linger=0)
    if session is not None:
        session.close()
    reply.send(any(answered))


def claim(folder, routing_ids, frame, *, with_session):
    receiver, sender = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_claim, args=(folder, routing_ids, frame, with_session, sender))
    process.start()
    try:
        assert receiver.poll(30)
        return receiver.recv()
    finally:
        process.join(10)
        process.close()
        receiver.close()
        sender.close()


@pytest.mark.parametrize("with_session", [False, True], ids=["stranger", "another session"])
def test_another_process_cannot_use_a_token_it_has_learnt(daemon, with_session):  # case F2 # case F8
    with RawClient(daemon.folder, connect=False) as victim, RawClient(daemon.folder) as observer:
        assert isinstance(victim.answer, Welcome)
        frame = wire.encode(Status(1, victim.epoch))
        # The victim has not connected its DEALER yet, so nothing but the kernel's word stands in the way.
        assert not claim(daemon.folder, [victim.answer.token], frame, with_session=with_session)
        counter = "num_wrong_peers" if with_session else "num_peers_denied"
        eventually(lambda: observer.counter(counter) >= 1)
        victim.dealer = victim.connect_dealer(victim.answer.token)
        assert victim.status().pid == daemon.pid


def test_the_routing_id_of_a_connected_session_cannot_be_taken_over(daemon):  # case F8
    with RawClient(daemon.folder) as victim:
        cache = victim.open_cache()
        victim.reserve(cache, 2)
        frame = wire.encode(Reserve(1, victim.epoch, cache, 100))
        assert not claim(daemon.folder, [victim.answer.token], frame, with_session=True)
        assert totals(victim.status()) == (0, 2)


def test_a_tokens_own_process_may_not_use_it_from_a_second_session_of_another(daemon):  # case F2
    with RawClient(daemon.folder) as raw:
        stranger = raw.connect_dealer(b"\x01" * 32)
        stranger.send(wire.encode(Status(1, raw.epoch)))
        eventually(lambda: raw.counter("num_unknown_tokens") == 1)
        assert not stranger.poll(0)


def first_routing_id(seed: int) -> bytes:
    """What libzmq gives the first peer without an id of its own, after srand(seed) and one ROUTER-like socket before.

    The daemon makes two: its doorkeeper, and the ROUTER.
    """
    libc = ctypes.CDLL(None)
    libc.srand(ctypes.c_uint(seed))
    for _ in range(2):
        low, high = libc.rand() & 0xFFFFFFFF, libc.rand() & 0xFFFFFFFF
    return b"\0" + struct.pack(">I", low | (high << 31) & 0xFFFFFFFF)


def test_the_model_of_libzmqs_routing_ids_is_right(tmp_path):
    ctypes.CDLL(None).srand(ctypes.c_uint(77))
    context = zmq.Context()
    doorkeeper, router, dealer = (context.socket(kind) for kind in (zmq.REP, zmq.ROUTER, zmq.DEALER))
    router.bind(f"ipc://{tmp_path}/r.sock")
    dealer.connect(f"ipc://{tmp_path}/r.sock")
    dealer.send(b"")
    assert not doorkeeper.closed
    assert router.recv_multipart()[0] == first_routing_id(77)
    context.destroy(linger=0)


@pytest.mark.parametrize("guess", ["unseeded", "start time"])
def test_routing_ids_that_libzmq_would_give_out_next_harm_nobody(tmp_path, guess):  # case F8
    """A peer takes the id that libzmq would invent next, then one without an id connects: libzmq would abort.

    Unseeded, rand(3) is as after srand(1). posix_ipc, which the daemon imports, calls srand with the time in seconds.
    """
    started = int(time.time())
    with running_daemon(tmp_path) as daemon, RawClient(daemon.folder) as observer:
        seeds = [1] if guess == "unseeded" else range(started, min(started + 3, int(time.time()) + 1))
        claims = [first_routing_id(seed) for seed in seeds]
        frame = wire.encode(Status(1, observer.epoch))
        assert not claim(daemon.folder, [*claims, None], frame, with_session=True)
        assert daemon.is_alive
        eventually(lambda: observer.counter("num_unknown_tokens") == len(claims) + 1)
        observer.check()


def test_a_process_without_a_session_is_turned_away_in_the_handshake(daemon):  # case F8
    with RawClient(daemon.folder) as observer:
        num_unknown = observer.counter("num_unknown_tokens")
        assert not claim(daemon.folder, [None, b"me"], b"x", with_session=False)
        eventually(lambda: observer.counter("num_peers_denied") >= 2)
        assert observer.counter("num_unknown_tokens") == num_unknown


def test_a_session_cannot_make_connections_without_end(daemon):  # case F8
    with RawClient(daemon.folder) as raw:
        # ZeroMQ connects later: its own connection is to be among those that are let in.
        assert raw.counter("num_peers_denied") == 0
        dealers = [raw.connect_dealer(bytes([1, index]) * 16) for index in range(20)]
        for dealer in dealers:
            dealer.send(wire.encode(Status(1, raw.epoch)))
        eventually(lambda: raw.counter("num_peers_denied") >= 20 - 3)
        assert raw.counter("num_unknown_tokens") <= 3


def test_a_hello_may_claim_what_it_likes(daemon):  # case F2
    hello = encode(Hello(1, 1, pid_namespace="pid:[1]", label="pid=1 uid=0 session=1"))
    with RawClient(daemon.folder, hello=hello) as raw:
        [client] = raw.status().clients
        assert client.pid != 1


def test_a_claimed_uid_changes_nothing(tmp_path):  # case F2
    with running_daemon(tmp_path, access={"isolation": "uid"}) as daemon, RawClient(daemon.folder) as raw:
        raw.begin(raw.open_cache(model="m", salt="uid:12345"), num_blocks=1)
        assert [pool.tenant for pool in raw.status().pools] == ["uid:0"]
