"""The service with the real pools, a clock that the test moves, and memory that comes when the test says so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvd.block import HOST, BlockId, ChainHash, SessionId
from kvd.hashing import pack_hashes
from kvd.layout import KVLayout
from kvd.memory import HostSegment
from kvd.mover import Mover
from kvd.pool import Pools
from kvd.protocol import requests
from kvd.protocol.replies import Begun, CacheOpened, Done, Failed, Matched, Reply, Reserved, Sealed, StatusReply
from kvd.protocol.session import DeviceSegmentGranted
from kvd.protocol.wire import pack_block_ids, unpack_block_ids
from kvd.service import Identity, SendGrant, SendReply, SendRevoke, Service, ServiceSettings
from kvd.service.homes import Home

SETTINGS = ServiceSettings(default_wait_s=10.0, max_wait_s=60.0, growth_wait_s=3.0)
BLOCK_NBYTES = 4096
BLOCKS_PER_SEGMENT = 4
SEGMENT_NBYTES = BLOCK_NBYTES * BLOCKS_PER_SEGMENT
EPOCH = 7
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
ReplyT = TypeVar("ReplyT")


def names(*words: str) -> list[ChainHash]:
    """A chain hash for each word; what the words stand for does not matter here."""
    return [ChainHash(hashlib.sha256(word.encode()).digest()) for word in words]


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class HandStock:
    """Real segments, made at once while `gives`, else when the test calls `make`."""

    def __init__(self) -> None:
        self.segment_nbytes = SEGMENT_NBYTES
        self.gives = True
        self.failed: str | None = None
        self.num_requested = 0
        self.num_retries = 0
        self.ready: list[HostSegment] = []
        self.taken: set[HostSegment] = set()

    @property
    def ready_nbytes(self) -> int:
        return len(self.ready) * self.segment_nbytes

    def make(self, num_segments: int) -> None:
        self.ready += [HostSegment(self.segment_nbytes) for _ in range(num_segments)]

    def take(self, *, huge_pages: bool = False) -> HostSegment | None:
        assert not huge_pages
        if self.gives and not self.ready and self.failed is None:
            self.make(1)
        if not self.ready:
            return None
        segment = self.ready.pop(0)
        self.taken.add(segment)
        self.num_requested = max(0, self.num_requested - 1)
        return segment

    def request(self, num_segments: int, *, huge_pages: bool = False) -> None:
        assert not huge_pages
        self.num_requested = max(self.num_requested, num_segments)

    def withdraw(self) -> None:
        self.num_requested = 0

    def discard(self, segment: HostSegment) -> None:
        self.taken.remove(segment)
        segment.close()

    def retry(self) -> None:
        self.failed = None
        self.num_retries += 1

    def set_budget(self, budget_nbytes: int) -> None:
        pass

    def available_nbytes(self) -> int:
        return 123

    def close(self) -> None:
        for segment in (*self.ready, *self.taken):
            segment.close()


class House:
    """A service and everything around it."""

    def __init__(
        self,
        num_segments: int = 2,
        *,
        session_quota_blocks: int | None = None,
        uid_quota_blocks: int | None = None,
        settings: ServiceSettings | None = None,
        mover: Mover | None = None,
        card: Home | None = None,
    ) -> None:
        """With `card` that is the main home, and the one in host memory stands beside it."""
        self.clock = FakeClock()
        self.stock = HandStock()
        main = card or Home(HOST, self.stock)
        self.pools = Pools(
            budget_nbytes=num_segments * main.stock.segment_nbytes,
            segment_nbytes=main.stock.segment_nbytes,
            session_quota_nbytes=session_quota_blocks and session_quota_blocks * BLOCK_NBYTES,
            uid_quota_nbytes=uid_quota_blocks and uid_quota_blocks * BLOCK_NBYTES,
            device=main.device,
        )
        homes = [main]
        if card is not None:
            self.pools.add_device(HOST, budget_nbytes=num_segments * SEGMENT_NBYTES, segment_nbytes=SEGMENT_NBYTES)
            homes.append(Home(HOST, self.stock))
        self.service = Service(
            pools=self.pools,
            homes=homes,
            epoch=EPOCH,
            settings=settings or SETTINGS,
            mover=mover,
            version="1.2.3",
            pid=99,
            runtime_dir="/run/kvd",
            clock=self.clock,
        )
        self.clients: dict[SessionId, Client] = {}

    def client(self, *, uid: int = 1000, gid: int = 100, label: str = "") -> Client:
        session = self.service.open_session(Identity(pid=4000 + len(self.clients), uid=uid, gid=gid), label=label)
        client = self.clients[session] = Client(self, session)
        return client

    def deliver(self) -> None:
        """Hands out the outbox as the server would; every grant and revoke must make sense where it comes."""
        while self.service.outbox:
            item = self.service.outbox.popleft()
            client = self.clients[item.session]
            assert item.session in self.service.sessions, "something was sent to a session that ended"
            if isinstance(item, SendReply):
                client.received(item.message)
            elif isinstance(item, SendGrant):
                client.granted(item)
            else:
                assert isinstance(item, SendRevoke)
                del client.segments[item.message.pool, item.message.segment]

    def memory_ready(self) -> None:
        self.service.on_memory_ready()
        self.deliver()

    def pass_time(self, seconds: float) -> None:
        """Moves the clock, with a tick at each deadline on the way, as the loop would."""
        end_s = self.clock.now_s + seconds
        while (deadline_s := self.service.next_deadline_s) is not None and deadline_s <= end_s:
            assert deadline_s >= self.clock.now_s - 1e-6 or deadline_s <= self.clock.now_s
            self.clock.now_s = max(self.clock.now_s, deadline_s)
            self.service.tick(self.clock.now_s)
            self.deliver()
        self.clock.now_s = end_s

    def check(self) -> None:
        self.pools.check_integrity()
        assert len(self.stock.taken) == self.pools.usage(HOST).num_segments, "memory and pools disagree"

    def close(self) -> None:
        self.service.close()
        self.stock.close()


class Client:
    """One session; each verb returns its reply, or None while it waits."""

    def __init__(self, house: House, session: SessionId) -> None:
        self.house = house
        self.session = session
        self.replies: list[Reply] = []
        self.segments: dict[tuple[int, int], bool] = {}
        """(pool, segment) -> whether the descriptor is writable."""
        self.grants: list[SendGrant] = []
        self.pool = -1
        self.digest = b""
        self._request_id = 0

    def received(self, reply: Reply) -> None:
        self.replies.append(reply)

    def granted(self, item: SendGrant) -> None:
        key = item.message.pool, item.message.segment
        if isinstance(item.message, DeviceSegmentGranted):
            assert key not in self.segments, "a segment of a card is granted once"
            self.segments[key] = True
            return
        assert self.segments.get(key) is not True, "a segment is granted writable once"
        assert item.message.writable or key not in self.segments, "a segment is granted read-only once"
        self.segments[key] = item.message.writable
        self.grants.append(item)

    def ask(self, kind: type[requests.Request], *fields: object, epoch: int = EPOCH, **more: object) -> Reply | None:
        self._request_id += 1
        request = kind(self._request_id, epoch, *fields, **more)  # type: ignore[arg-type]
        self.house.service.handle(self.session, request)
        self.house.deliver()
        return self.answer(self._request_id)

    def answer(self, request_id: int | None = None) -> Reply | None:
        """The reply to that request (the latest one), once it came."""
        wanted = request_id or self._request_id
        found = [reply for reply in self.replies if reply.request_id == wanted]
        assert len(found) <= 1, "a request is answered once"
        return found[0] if found else None

    @property
    def latest(self) -> int:
        return self._request_id

    @staticmethod
    def opening() -> dict[str, object]:
        """The fields of a request that opens a cache."""
        return {
            "model": "model",
            "engine": "raw/1",
            "positional": "",
            "adapter": "",
            "salt": "",
            "num_layers": LAYOUT.num_layers,
            "num_kv_heads": LAYOUT.num_kv_heads,
            "head_dim": LAYOUT.head_dim,
            "dtype": LAYOUT.dtype,
            "block_tokens": LAYOUT.block_tokens,
            "block_nbytes": LAYOUT.block_nbytes,
        }

    def open(self, **changes: object) -> CacheOpened:
        request = self.opening()
        reply = expect(CacheOpened, self.ask(requests.OpenCache, **(request | changes)))
        self.pool, self.digest = reply.pool, reply.digest
        return reply

    def try_begin(
        self,
        hashes: Sequence[ChainHash],
        num_blocks: int | None = None,
        *,
        max_cached: int | None = None,
        cache: int = 1,
        **more: object,
    ) -> Reply | None:
        wanted = len(hashes) if num_blocks is None else num_blocks
        most = min(len(hashes), max(wanted, 0)) if max_cached is None else max_cached
        return self.ask(requests.Begin, cache, pack_hashes(hashes), most, wanted, **more)

    def begin(self, hashes: Sequence[ChainHash], num_blocks: int | None = None, **more: object) -> Attached:
        return Attached(self, expect(Begun, self.try_begin(hashes, num_blocks, **more)))

    def reserve(self, num_blocks: int) -> Reply | None:
        return self.ask(requests.Reserve, 1, num_blocks)

    def try_seal(self, blocks: Iterable[int], hashes: Sequence[ChainHash], checksums: bytes = b"") -> Reply | None:
        return self.ask(requests.Seal, 1, pack(blocks), pack_hashes(hashes), checksums)

    def seal(self, blocks: Iterable[int], hashes: Sequence[ChainHash], checksums: bytes = b"") -> list[int]:
        reply = expect(Sealed, self.try_seal(blocks, hashes, checksums))
        standing = list(unpack_block_ids(reply.blocks))
        self.may_map(standing)
        return standing

    def retain(self, blocks: Iterable[int], num_blocks: int = 0) -> Reply | None:
        return self.ask(requests.Retain, 1, pack(blocks), num_blocks)

    def release(
        self,
        blocks: Iterable[int] = (),
        reserved: Iterable[int] = (),
        hashes: Sequence[ChainHash] = (),
        *,
        ack: bool = True,
    ) -> Reply | None:
        return self.ask(requests.Release, 1, pack(blocks), pack(reserved), pack_hashes(hashes), ack)

    def match(self, hashes: Sequence[ChainHash]) -> int:
        return expect(Matched, self.ask(requests.Match, 1, pack_hashes(hashes))).num_resident

    def status(self) -> StatusReply:
        return expect(StatusReply, self.ask(requests.Status))

    def check(self) -> Done:
        return expect(Done, self.ask(requests.Check))

    def die(self) -> None:
        self.house.service.end_session(self.session)
        self.house.deliver()

    def may_map(self, blocks: Iterable[int], *, writable: bool = False) -> None:
        """Whoever is told of a block has a descriptor of its segment by then."""
        for block in blocks:
            key = self.pool, block // BLOCKS_PER_SEGMENT
            assert key in self.segments, f"block {block} was named before its segment was granted"
            assert self.segments[key] or not writable, f"block {block} was reserved without a writable descriptor"


class Attached:
    """A sequence that began."""

    def __init__(self, client: Client, reply: Begun) -> None:
        blocks = list(unpack_block_ids(reply.blocks))
        self.reply = reply
        self.cached, self.reserved = blocks[: reply.num_cached], blocks[reply.num_cached :]
        client.may_map(self.cached)
        client.may_map(self.reserved, writable=True)


def pack(blocks: Iterable[int]) -> bytes:
    return pack_block_ids([BlockId(block) for block in blocks])


def reserved_blocks(client: Client, reply: Reply | None) -> list[int]:
    blocks = list(unpack_block_ids(expect(Reserved, reply).blocks))
    client.may_map(blocks, writable=True)
    return blocks


def expect(kind: type[ReplyT], reply: object) -> ReplyT:
    assert isinstance(reply, kind), f"expected {kind.__name__}, got {reply}"
    return reply


def error_code(reply: object) -> str:
    return expect(Failed, reply).code
