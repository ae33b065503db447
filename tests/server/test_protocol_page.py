"""PROTOCOL.md is right, and enough to write a client from."""

from __future__ import annotations

import re
import socket
import struct

import zmq

from kvd import errors
from kvd.protocol import control_page, session, wire
from tests.support.protocol_tables import PAGE, updated

TEXT = PAGE.read_text()


def test_the_tables_and_the_worked_example_are_the_codes():
    assert updated(TEXT) == TEXT, "run: .venv/bin/python -m tests.support.protocol_tables"


def test_every_error_code_is_listed():
    listed = re.findall(r"^\| `([a-z-]+)` \| \d+ \|", TEXT.partition("## Errors")[2], re.MULTILINE)
    assert set(listed) == set(errors.BY_CODE)


def test_the_limits_are_the_codes():
    assert f"{wire.MAX_MESSAGE_NBYTES:,} bytes" in TEXT
    assert f"{session.MAX_DATAGRAM_NBYTES:,} bytes" in TEXT
    assert f"at most {wire.MAX_IDS_PER_RELEASE:,} a list in a `release`" in TEXT
    assert f"{wire.MAX_IDS_PER_MESSAGE:,} in a `seal` or `retain`" in TEXT
    assert f"Version {wire.PROTOCOL_MAX}." in TEXT


def test_the_control_page_is_the_codes():
    assert ", ".join(control_page.COUNTERS) in TEXT
    assert f"`{control_page.MAGIC.decode()}`" in TEXT


# What follows is a client written from the page: nothing of kvd, no msgpack library.


def _pack(value):
    if isinstance(value, int):
        return bytes([value]) if value < 128 else b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(_pack(k) + _pack(v) for k, v in value.items())
    return bytes([0x90 | len(value)]) + b"".join(map(_pack, value))


def _unpack(raw, at=0):
    """(value, end) of one value of the kinds that occur here."""
    kind = raw[at]
    if kind < 0x80:
        return kind, at + 1
    if kind & 0xF0 in {0x80, 0x90}:
        values, at = [], at + 1
        for _ in range((kind & 0x0F) * (2 if kind < 0x90 else 1)):
            value, at = _unpack(raw, at)
            values.append(value)
        return (dict(zip(values[::2], values[1::2], strict=True)) if kind < 0x90 else values), at
    if kind & 0xE0 == 0xA0:
        end = at + 1 + (kind & 0x1F)
        return raw[at + 1 : end].decode(), end
    if kind in {0xC2, 0xC3}:
        return kind == 0xC3, at + 1
    if kind in {0xC4, 0xD9}:
        end = at + 2 + raw[at + 1]
        return (raw[at + 2 : end] if kind == 0xC4 else raw[at + 2 : end].decode()), end
    layout = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}[kind]
    end = at + 1 + struct.calcsize(layout)
    return struct.unpack_from(layout, raw, at + 1)[0], end


def test_a_client_written_from_the_page_alone(daemon):
    hello = bytes.fromhex(re.search(r"^hello +([0-9a-f]+)$", TEXT, re.MULTILINE)[1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as session_socket:
        session_socket.settimeout(10)
        session_socket.connect(f"{daemon.folder}/session.sock")
        session_socket.send(hello)
        datagram, [page], _, _ = socket.recv_fds(session_socket, 16384, 1)
        welcome, _ = _unpack(datagram)
        assert welcome["type"] == "welcome"
        assert len(welcome["token"]) == 32
        with open(page, "rb", buffering=0) as control:
            magic, epoch, pid = struct.unpack("<8sQI", control.read(20))
        assert (magic, epoch, pid) == (b"KVDCTRL1", welcome["epoch"], daemon.pid)

        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, welcome["token"])
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(f"ipc://{daemon.folder}/requests.sock")

        def ask(*message):
            dealer.send(b"KV\x01" + _pack(list(message)))
            reply = dealer.recv()
            assert reply[:3] == b"KV\x01"
            return _unpack(reply, 3)[0]

        opened = ask("open_cache", 1, epoch, "demo", "raw/1", "", "", "", 1, 1, 64, "float16", 16, 4096)
        assert opened[:3] == ["cache_opened", 1, epoch]
        _, _, _, cache, pool, digest, blocks_per_segment, segment_nbytes, *_ = opened
        assert len(digest) == 32
        assert blocks_per_segment == segment_nbytes // 4096
        assert ask("reserve", 2, epoch, cache, 3) == ["reserved", 2, epoch, struct.pack("<3I", 0, 1, 2)]
        datagram, [memory], _, _ = socket.recv_fds(session_socket, 16384, 1)
        granted, _ = _unpack(datagram)
        assert granted == {
            "type": "segment_granted",
            "pool": pool,
            "segment": 0,
            "nbytes": segment_nbytes,
            "writable": True,
        }
        open(memory, "rb").close()
        failed = ask("reserve", 3, epoch + 1, cache, 3)
        assert failed[:4] == ["failed", 3, epoch, "daemon-restarted"]
        context.destroy(linger=0)
