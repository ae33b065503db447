"""The house with tiers below it, and a mover that runs by hand. Blocks have real bytes that follow from their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvd.block import BlockId, ChainHash, NamespaceDigest, SessionId
from kvd.hashing import pack_hashes
from kvd.memory import DeviceBlock
from kvd.mover import Fill, Job, Learn, Spill
from kvd.protocol import requests
from kvd.protocol.replies import CacheOpened, Matched
from kvd.service import Identity, Isolation
from kvd.service.homes import Home
from kvd.service.pool_rules import PoolPolicy, PoolRules, Rule
from kvd.service.settings import TierSettings
from kvd.tiers.base import TierKey
from kvd.tiers.stack import Stack
from tests.service.harness import BLOCK_NBYTES, SETTINGS, Attached, Client, House, expect
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier
from tests.support.hand_mover import HandMover


def content(chain_hash: bytes) -> bytes:
    """What the block of this hash holds, and no other."""
    return hashlib.sha256(b"kv" + chain_hash).digest() * (BLOCK_NBYTES // 32)


class TieredHouse(House):
    def __init__(
        self,
        num_segments: int = 2,
        *,
        tiers: Sequence[DictTier] | None = None,
        session_quota_blocks: int | None = None,
        client_type: type[TieredClient] | None = None,
        rules: Sequence[Rule] = (),
        isolation: Isolation = "group",
        card: Home | None = None,
        idle_release_s: float = 0.0,
        **changes: Any,
    ) -> None:
        """`changes` are of `TierSettings` and `PoolPolicy`; `rules` are those of pools of their own."""
        self._client_type = client_type or TieredClient
        self.inner = list(tiers) if tiers is not None else [DictTier(name="redis")]
        self.tiers = [FaultyTier(tier) for tier in self.inner]
        self.stack = Stack(self.tiers, lasting=[self.tiers[-1].name])
        self.mover = HandMover(self.stack, lambda: self.clock.now_s)
        policy = PoolPolicy(**{name: changes.pop(name) for name in ("spill", "after_promote") if name in changes})
        settings = replace(
            SETTINGS,
            isolation=isolation,
            tiers=TierSettings(**changes),
            pool_rules=PoolRules(rules, policy),
            idle_release_s=idle_release_s,
        )
        super().__init__(
            num_segments, settings=settings, mover=self.mover, session_quota_blocks=session_quota_blocks, card=card
        )

    @property
    def tier(self) -> FaultyTier:
        """The only one."""
        (tier,) = self.tiers
        return tier

    @property
    def below(self) -> DictTier:
        (tier,) = self.inner
        return tier

    @property
    def pool(self) -> Any:
        return self.pools.all[0]

    def client(self, *, uid: int = 1000, gid: int = 100, label: str = "") -> TieredClient:
        session = self.service.open_session(Identity(pid=4000 + len(self.clients), uid=uid, gid=gid), label=label)
        client = self.clients[session] = self._client_type(self, session)
        return client

    def mover_done(self) -> None:
        """The loop wakes up and takes over what the mover has done."""
        while True:
            self.service.on_mover_done()
            self.deliver()
            self.check()
            if not self.mover.has_done:
                break

    def do(self, *jobs: Job) -> None:
        for job in jobs:
            self.mover.do(job)
        self.mover_done()

    def run_mover(self, kind: type[Job] = Job) -> int:
        """Everything of that kind that waits, and what follows from it; how many jobs that were."""
        count = 0
        self.mover_done()
        while waiting := self.mover.waiting(kind):
            count += len(waiting)
            self.do(*waiting)
        return count

    def put_below(self, client: Client, hashes: Sequence[ChainHash], *, level: int = 0) -> None:
        """As if another daemon had spilled them."""
        for chain_hash in hashes:
            self.inner[level].blocks[TierKey(NamespaceDigest(client.digest), chain_hash)] = content(chain_hash)

    def held_below(self, level: int = 0) -> set[ChainHash]:
        return {key.chain_hash for key in self.inner[level].blocks}

    def bytes_of(self, client: Client, block: int) -> bytes:
        pool = self.pools.all[client.pool]
        memory = self.service._table.memory(pool, BlockId(block))
        if isinstance(memory, DeviceBlock):
            memory.segment.read(memory.offset, data := bytearray(memory.nbytes))
            return bytes(data)
        with memory.view as view:
            return bytes(view)

    def write(self, client: Client, block: int, data: bytes) -> None:
        pool = self.pools.all[client.pool]
        memory = self.service._table.memory(pool, BlockId(block))
        if isinstance(memory, DeviceBlock):
            memory.segment.write(memory.offset, bytearray(data))
            return
        with memory.view as view:
            view[:] = data

    def close(self) -> None:
        self.mover.close()
        self.mover_done()
        super().close()


class TieredClient(Client):
    house: TieredHouse

    def __init__(self, house: TieredHouse, session: SessionId) -> None:
        super().__init__(house, session)

    def open(self, **changes: object) -> CacheOpened:
        request: dict[str, object] = self.opening() | changes
        reply = self.ask(requests.OpenCache, **request)
        if reply is None:
            self.house.run_mover(Learn)
            reply = self.answer()
        opened = expect(CacheOpened, reply)
        self.pool, self.digest = opened.pool, opened.digest
        return opened

    def publish(self, hashes: Sequence[ChainHash], *, keep: bool = False) -> list[int]:
        """Computes the blocks of a whole prompt: writes and seals what is not there; then lets go, unless `keep`."""
        attached = self.begin(hashes, wait_s=0.0)
        missing = hashes[len(attached.cached) :]
        for block, chain_hash in zip(attached.reserved, missing, strict=True):
            self.house.write(self, block, content(chain_hash))
        blocks = attached.cached + (self.seal(attached.reserved, missing) if missing else [])
        if not keep:
            self.release(blocks)
        return blocks

    def verify(self, attached: Attached, hashes: Sequence[ChainHash]) -> None:
        for block, chain_hash in zip(attached.cached, hashes, strict=False):
            assert self.house.bytes_of(self, block) == content(chain_hash), "wrong bytes"

    def match(self, hashes: Sequence[ChainHash]) -> int:
        return self.reach(hashes).num_resident

    def reach(self, hashes: Sequence[ChainHash]) -> Matched:
        reply = self.ask(requests.Match, 1, pack_hashes(hashes))
        if reply is None:
            self.house.run_mover()
            reply = self.answer()
        return expect(Matched, reply)


__all__ = ["Fill", "Spill", "TieredClient", "TieredHouse", "content"]
