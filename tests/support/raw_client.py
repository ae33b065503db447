"""A client that speaks the bare protocol, to say what the client library never would.

with RawClient(folder) as raw:
    cache = raw.open_cache("m")
    begun = raw.begin(cache, hashes, num_blocks=4)

Run as a program (`tests.support.processes` does) it obeys the lines on its stdin until it is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import zmq

from kvd.block import BlockId
from kvd.layout import KVLayout
from kvd.protocol import requests, wire
from kvd.protocol import session as messages
from kvd.protocol.replies import Begun, CacheOpened, Done, Flushed, Reply, Reserved, Sealed, StatusReply
from kvd.status import Snapshot

BOUND_S = 30.0
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_tokens=16)
"""One page a block."""


def hashes(*names: str) -> bytes:
    """Packed hashes, one for each name."""
    return b"".join(name.encode().ljust(32, b".") for name in names)


class RawClient:
    """One session. Everything it does blocks, with a bound."""

    def __init__(self, folder: Path, *, label: str = "raw", hello: bytes | None = None, connect: bool = True) -> None:
        self.folder = folder
        self.descriptors: list[int] = []
        self.pushed: list[object] = []
        """Grants, revokes and goodbyes read so far."""
        self._ids = itertools.count(1)
        self.session_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.session_socket.settimeout(BOUND_S)
        self.session_socket.connect(str(folder / messages.SESSION_SOCKET))
        said = messages.Hello(wire.PROTOCOL_MIN, wire.PROTOCOL_MAX, client_version="raw", label=label)
        with contextlib.suppress(BrokenPipeError):  # a refusal may come before our hello has left
            self.session_socket.send(messages.encode(said) if hello is None else hello)
        self.answer = self.next_datagram()
        self.context: zmq.Context[Any] | None = None
        if isinstance(self.answer, messages.Welcome):
            self.pushed.clear()
            self.epoch = self.answer.epoch
            if connect:
                self.dealer = self.connect_dealer(self.answer.token)

    def connect_dealer(self, routing_id: bytes, *, rcvhwm: int = 0) -> zmq.Socket[Any]:
        """A DEALER with that routing id, ours or not."""
        self.context = self.context or zmq.Context()
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.rcvtimeo = dealer.sndtimeo = int(BOUND_S * 1000)
        dealer.sndhwm, dealer.rcvhwm = 0, rcvhwm
        if routing_id:
            dealer.routing_id = routing_id
        dealer.connect(f"ipc://{self.folder / messages.REQUEST_SOCKET}")
        return dealer

    def next_datagram(self) -> object:
        """The next message on the session socket, None at its end; descriptors are kept."""
        datagram, descriptors, _, _ = socket.recv_fds(self.session_socket, messages.MAX_DATAGRAM_NBYTES, 4)
        self.descriptors += descriptors
        if not datagram:
            return None
        message = messages.decode_from_daemon(datagram)
        self.pushed.append(message)
        return message

    def drain(self) -> list[object]:
        """Reads what has been pushed by now."""
        while select.select([self.session_socket], [], [], 0)[0] and self.next_datagram() is not None:
            pass
        return self.pushed

    def post(self, kind: type[Any], *fields: object, **named: object) -> int:
        """Sends a request and waits for nothing; its id."""
        request_id = next(self._ids)
        self.dealer.send(wire.encode(kind(request_id, self.epoch, *fields, **named)))
        return request_id

    def hang_up(self) -> None:
        """Closes the DEALER once everything posted has left this process; the session stays."""
        assert self.context is not None
        self.dealer.close(linger=int(BOUND_S * 1000))
        self.context.term()
        self.context = None

    def receive(self) -> Reply:
        """The next reply."""
        return wire.decode_reply(self.dealer.recv())

    def ask(self, kind: type[Any], *fields: object, **named: object) -> Any:
        """A request's reply, `Failed` too."""
        request_id = self.post(kind, *fields, **named)
        reply = self.receive()
        assert reply.request_id == request_id, (reply, request_id)
        return reply

    def open_cache(
        self, model: str = "m", salt: str = "", *, device: str = "", staged: bool = False, layout: KVLayout = LAYOUT
    ) -> int:
        """Its handle; the whole reply is in `opened`."""
        opened = self.ask(requests.OpenCache, **self.opening(model, salt, device=device, staged=staged, layout=layout))
        assert isinstance(opened, CacheOpened), opened
        self.opened = opened
        return opened.cache

    @staticmethod
    def opening(
        model: str = "m", salt: str = "", *, device: str = "", staged: bool = False, layout: KVLayout = LAYOUT
    ) -> dict[str, Any]:
        """The fields of a request that opens a cache."""
        return {
            "model": model,
            "engine": "raw/1",
            "positional": "",
            "adapter": "",
            "salt": salt,
            "block_nbytes": layout.block_nbytes,
            "device": device,
            "staged": staged,
            **dataclasses.asdict(layout),
        }

    def begin(self, cache: int, packed: bytes = b"", *, num_blocks: int, **named: object) -> Begun:
        begun = self.ask(requests.Begin, cache, packed, max_cached=len(packed) // 32, num_blocks=num_blocks, **named)
        assert isinstance(begun, Begun), begun
        return begun

    def reserve(self, cache: int, num_blocks: int) -> bytes:
        reserved = self.ask(requests.Reserve, cache, num_blocks)
        assert isinstance(reserved, Reserved), reserved
        return reserved.blocks

    def seal(self, cache: int, blocks: bytes, packed: bytes) -> bytes:
        sealed = self.ask(requests.Seal, cache, blocks, packed)
        assert isinstance(sealed, Sealed), sealed
        return sealed.blocks

    def release(self, cache: int, blocks: Sequence[int]) -> None:
        reply = self.ask(requests.Release, cache, wire.pack_block_ids(cast("Sequence[BlockId]", blocks)), ack=True)
        assert isinstance(reply, Done), reply

    def flush(self) -> Flushed:
        """Of everything."""
        reply = self.ask(requests.Flush)
        assert isinstance(reply, Flushed), reply
        return reply

    def status(self) -> Snapshot:
        reply = self.ask(requests.Status)
        assert isinstance(reply, StatusReply), reply
        return reply.snapshot

    def check(self) -> None:
        """Every invariant of the daemon's pools holds."""
        reply = self.ask(requests.Check)
        assert isinstance(reply, Done), reply

    def counter(self, name: str) -> int:
        return self.status().counters[name]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # It maps nothing; a client that does closes that before it calls this.
            self.session_socket.send(messages.encode(messages.Farewell()))
        self.session_socket.close()
        if self.context is not None:
            self.context.destroy(linger=0)
            self.context = None
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def totals(snapshot: Snapshot) -> tuple[int, int]:
    """(references, reserved blocks) over all pools."""
    return sum(pool.num_references for pool in snapshot.pools), sum(pool.num_reserved for pool in snapshot.pools)


def zmtp_peer(folder: Path, routing_id: bytes) -> socket.socket:
    """A connection that speaks ZMTP 3.0 by hand, up to where messages begin."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(10)
    peer.connect(f"{folder}/requests.sock")
    peer.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
    ready = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id)):
        ready += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
    received = b""
    while b"READY" not in received:
        received += peer.recv(4096)
    return peer


class Puppet:
    """Does what it is told, one JSON object a line: {"seal": n}, {"attach": n}, {"fork": true}, …"""

    def __init__(self, folder: Path) -> None:
        self.raw = RawClient(folder, label="subprocess")
        self.cache = self.raw.open_cache()

    def obey(self, todo: dict[str, int]) -> None:
        for verb, argument in todo.items():
            getattr(self, verb)(argument)
        os.write(1, b"done %d\n" % os.getpid())

    def seal(self, num_blocks: int) -> None:
        """Blocks named "block 0", "block 1", …"""
        begun = self.raw.begin(self.cache, num_blocks=num_blocks)
        self.raw.seal(self.cache, begun.blocks, hashes(*(f"block {index}" for index in range(num_blocks))))

    def attach(self, num_blocks: int) -> None:
        names = hashes(*(f"block {index}" for index in range(num_blocks)))
        assert self.raw.begin(self.cache, names, num_blocks=num_blocks).num_cached == num_blocks

    def reserve(self, num_blocks: int) -> None:
        self.raw.reserve(self.cache, num_blocks)

    def post(self, num_requests: int) -> None:
        """Requests whose replies nobody reads; returns when all have left this process."""
        for _ in range(num_requests):
            self.raw.post(requests.Reserve, self.cache, 1)
        self.raw.hang_up()

    def hoard(self, num_frames: int) -> None:
        """One message of that many tiny frames, until the daemon hangs up."""
        assert isinstance(self.raw.answer, messages.Welcome)
        self.raw.hang_up()
        with zmtp_peer(self.raw.folder, self.raw.answer.token) as peer, contextlib.suppress(ConnectionError):
            for _ in range(num_frames // 100_000):
                peer.sendall(b"\x01\x01x" * 100_000)

    def fork(self, _argument: bool) -> None:
        """A child that keeps every descriptor of its parent open, the session socket too."""
        if os.fork() == 0:
            os.write(1, b"child %d\n" % os.getpid())
            select.select([sys.stdin], [], [])
            os._exit(0)


def main(folder: str) -> None:
    puppet = Puppet(Path(folder))
    for line in sys.stdin:
        puppet.obey(json.loads(line))


if __name__ == "__main__":
    main(sys.argv[1])
