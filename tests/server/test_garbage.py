"""Messages that no client of ours would send."""

from __future__ import annotations

import os
import pickle

import msgspec
import pytest
import zmq

from kvd.protocol.replies import Failed
from kvd.protocol.requests import Match, Status
from kvd.protocol.session import Goodbye
from kvd.protocol.wire import encode
from tests.support.processes import client_process
from tests.support.raw_client import RawClient
from tests.support.wait import eventually

MIB = 1 << 20


def with_another_element(frame: bytes, element: bytes) -> bytes:
    """A message of a later version: one field more than anybody here looks at."""
    return frame[:3] + bytes([frame[3] + 1]) + frame[4:] + element


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"K",
        b"KV",
        b"KV\x01",
        os.urandom(300),
        pickle.dumps(Status),
        b"KV\x01" + b"\x91" * 100_000,
        b"KV\x01" + b"\xdd\xff\xff\xff\xff",
        b"KV\x01" + b"\xc6\xff\xff\xff\xff",
        with_another_element(encode(Status(1, 2)), b"\x91" * 200_000 + b"\xc0"),
        encode(Match(1, 2, 3, b"x" * 64))[:-10],
    ],
    ids=[
        *("empty", "short", "no version", "no body", "random", "pickle", "nested", "huge array", "huge bytes"),
        *("nested where nothing is looked at", "truncated"),
    ],
)
def test_bad_frames_are_dropped_and_counted(daemon, frame):  # case F3
    with RawClient(daemon.folder) as raw:
        raw.dealer.send(frame)
        assert raw.post(Status)
        replies = [raw.receive()]
        while isinstance(replies[-1], Failed):
            replies.append(raw.receive())
        assert replies[-1].snapshot.counters["num_bad_frames"] == 1


def test_what_begins_like_no_frame_of_ours_is_dropped_without_a_word(daemon):  # case F3
    with RawClient(daemon.folder) as raw:
        raw.dealer.send(b"XX" + encode(Status(4_000_000_000, raw.epoch))[2:])
        assert raw.post(Status)
        reply = raw.receive()
        assert reply.request_id != 4_000_000_000
        assert reply.snapshot.counters["num_bad_frames"] == 1


def test_a_bad_frame_with_a_readable_request_id_is_answered(daemon):  # case F3
    body = msgspec.msgpack.encode(["no such verb", 77, raw_epoch := 5, "x"])
    with RawClient(daemon.folder) as raw:
        raw.dealer.send(b"KV\x01" + body)
        failed = raw.receive()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code) == (77, "invalid-request")
        assert failed.epoch == raw.epoch != raw_epoch


def test_another_version_of_the_protocol_is_told_both(daemon):  # case F3
    with RawClient(daemon.folder) as raw:
        raw.dealer.send(b"KV\x63" + msgspec.msgpack.encode(["status", 4000000000, 1]))
        failed = raw.receive()
        assert (failed.request_id, failed.code) == (4000000000, "version-mismatch")
        assert "99" in failed.message
        assert "1 to 1" in failed.message


def test_an_earlier_daemons_epoch_is_refused(daemon):
    with RawClient(daemon.folder) as raw:
        raw.epoch += 1
        failed = raw.ask(Status)
        assert (failed.code, failed.epoch) == ("daemon-restarted", raw.epoch - 1)


def test_a_hundred_thousand_tiny_frames_in_one_message(daemon):  # case F3
    with RawClient(daemon.folder) as observer, RawClient(daemon.folder) as raw:
        before_nbytes = daemon.anonymous_nbytes()
        raw.dealer.send_multipart([b"x"] * 100_000)
        goodbye = raw.next_datagram()
        assert isinstance(goodbye, Goodbye)
        assert goodbye.code == "invalid-request"
        assert "one frame" in goodbye.message
        assert raw.next_datagram() is None
        eventually(lambda: observer.counter("num_excess_frames") >= 99_999)
        assert len(observer.status().clients) == 1
        assert daemon.anonymous_nbytes() < before_nbytes + 64 * MIB


def test_a_message_larger_than_the_limit_ends_only_its_own_connection(daemon):  # case F3
    with RawClient(daemon.folder) as observer, RawClient(daemon.folder) as raw:
        before_nbytes = daemon.anonymous_nbytes()
        with raw.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended:
            raw.dealer.send(b"KV\x01" + bytes(64 * MIB), copy=False)
            assert ended.poll(10_000)
            raw.dealer.disable_monitor()
        assert observer.counter("num_bad_frames") == 0  # nobody has looked at it
        assert daemon.anonymous_nbytes() < before_nbytes + 32 * MIB
        assert daemon.is_alive


def test_a_hundred_thousand_malformed_messages_harm_nobody(daemon):  # case F3
    with RawClient(daemon.folder) as observer, RawClient(daemon.folder) as raw:
        before_nbytes = daemon.anonymous_nbytes()
        for _ in range(100_000):
            raw.dealer.send(b"\x80\x04garbage")
        eventually(lambda: observer.counter("num_bad_frames") == 100_000, timeout_s=60)
        assert daemon.anonymous_nbytes() < before_nbytes + 64 * MIB
        raw.status()


def test_a_message_without_end_is_noticed(daemon):  # case F3
    with RawClient(daemon.folder) as observer, client_process(daemon.folder) as hoarder:
        before_nbytes = daemon.anonymous_nbytes()
        hoarder.start({"hoard": 1 << 30})  # frames of one byte, in one message
        eventually(lambda: len(observer.status().clients) == 1, timeout_s=30)
        assert observer.counter("num_sessions_expelled") == 1
        eventually(lambda: daemon.anonymous_nbytes() < before_nbytes + 64 * MIB)
