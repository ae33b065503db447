"""Random lives above random tiers: copies that end in any order, fail, or hang, flushes and expiry in between.

The model is a function: what a block must hold follows from its namespace, its hash, and how often the namespace was
flushed when it was written. Whoever is given a block finds exactly that in it, for as long as he holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvd.block import ChainHash, NamespaceDigest, SessionId
from kvd.errors import BlockCorrupt, BlockMissing, StaleGeneration, TierFull, TierUnavailable
from kvd.hashing import pack_hashes
from kvd.mover import Fill, Job, Lookup
from kvd.protocol import requests
from kvd.protocol.replies import Begun, Reply
from kvd.protocol.wire import unpack_block_ids
from kvd.service.pool_rules import PoolPolicy, Rule
from tests.service.harness import BLOCK_NBYTES
from tests.service.test_machine import HASHES, LONGEST_STAY_S, Life, ServiceMachine
from tests.service.tiers import TieredClient, TieredHouse
from tests.support.dict_tier import DictTier

FAULTS = {
    "get": [BlockMissing("expired"), BlockCorrupt("flipped", cause="bad-checksum"), TierUnavailable("gone")],
    "put": [TierFull("full"), TierUnavailable("gone"), StaleGeneration("restarted", cause="generation-lost")],
    "contains": [TierUnavailable("gone")],
    "generation": [TierUnavailable("gone")],
    "delete": [TierUnavailable("gone")],
}


class WritingClient(TieredClient):
    """Writes what it seals, and knows what every block it was given must hold."""

    def __init__(self, house: TieredHouse, session: SessionId) -> None:
        super().__init__(house, session)
        self.wanted: dict[int, list[ChainHash]] = {}
        self.holds: dict[int, bytes] = {}

    def right_bytes(self, chain_hash: bytes) -> bytes:
        assert self.house.service.below is not None
        lineage = self.house.service.below.lineages.get(NamespaceDigest(self.digest))
        assert lineage is not None
        seed = hashlib.sha256(self.digest + chain_hash + bytes([lineage.num_flushes])).digest()
        return seed * (BLOCK_NBYTES // len(seed))

    def seal(self, blocks: Sequence[int], hashes: Sequence[ChainHash], checksums: bytes = b"") -> list[int]:  # type: ignore[override]
        for block, chain_hash in zip(blocks, hashes, strict=True):
            self.house.write(self, block, self.right_bytes(chain_hash))
        standing = super().seal(blocks, hashes, checksums)
        self.given(standing, hashes)
        return standing

    def try_begin(self, hashes: Sequence[ChainHash], num_blocks: int | None = None, **more: Any) -> Reply | None:
        self.wanted[self.latest + 1] = list(hashes)
        return super().try_begin(hashes, num_blocks, **more)

    def received(self, reply: Reply) -> None:
        super().received(reply)
        if isinstance(reply, Begun):
            cached = unpack_block_ids(reply.blocks)[: reply.num_cached]
            self.given(cached, self.wanted[reply.request_id][: reply.num_cached])

    def given(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        for block, chain_hash in zip(blocks, hashes, strict=True):
            right = self.right_bytes(chain_hash)
            assert self.house.bytes_of(self, block) == right, "a block holds what it must not"
            self.holds[block] = right


class TieredMachine(ServiceMachine):
    longest_stay_s = LONGEST_STAY_S + 0.5  # what copies hold may come back last of all
    house: TieredHouse

    def _new_house(self) -> TieredHouse:
        return TieredHouse(
            3,
            tiers=[DictTier(name="host", max_blocks=3), DictTier(name="redis")],
            session_quota_blocks=10,
            client_type=WritingClient,
            low_watermark=0.5,
            high_watermark=0.8,
            after_promote="retain",
            # The first life's user has pools of its own for a namespace that its tenant's other lives share.
            rules=[Rule(name="root", uids=frozenset({0}), policy=PoolPolicy(spill="write_through"))],
        )

    def _new_life(self, index: int) -> Life:
        client = self.house.client(uid=0 if index == 0 else 1000, gid=100 + index // 3)
        client.open()
        return Life(client, 0)

    def teardown(self) -> None:
        for tier in self.house.tiers:
            tier.heal()
        self._run_copies()
        super().teardown()

    def _run_copies(self) -> None:
        while running := self.house.mover.running(Job):
            for job in running:
                self.house.mover.end(job)
            self.house.mover_done()
        self.house.run_mover()

    def _end_copies(self) -> None:
        self._run_copies()
        below = self.house.service.below
        assert below is not None
        assert len(below.promotions) == 0, "a promotion never ends"
        for pool in self.house.pools.all:
            assert not pool.transfers.fills
            assert not pool.transfers.spills
            assert not pool.transfers.holds

    jobs = st.integers(0, 50)

    @rule(which=jobs, count=st.integers(1, 4))
    def threads_take_jobs(self, which: int, count: int) -> None:
        for _ in range(count):
            waiting = self.house.mover.waiting(Job)
            if waiting:
                self.house.mover.begin(waiting[which % len(waiting)])

    @rule(which=jobs, count=st.integers(1, 4), look=st.booleans())
    def threads_end_jobs(self, which: int, count: int, look: bool) -> None:
        for _ in range(count):
            running = self.house.mover.running(Job)
            if running:
                self.house.mover.end(running[which % len(running)])
        if look:
            self.house.mover_done()

    @rule()
    def the_mover_is_quick(self) -> None:
        self.house.run_mover()

    @rule(level=st.integers(0, 1), call=st.sampled_from(sorted(FAULTS)), which=st.integers(0, 2), after=st.booleans())
    def a_tier_will_fail(self, level: int, call: str, which: int, after: bool) -> None:
        faults = FAULTS[call]
        self.house.tiers[level].fail_next(call, faults[which % len(faults)], after=after and call != "get")  # type: ignore[arg-type]

    @rule(level=st.integers(0, 1), down=st.sampled_from([False, False, True]))
    def a_breaker_opens_or_closes(self, level: int, down: bool) -> None:
        self.house.tiers[level].down_for_s = 1.0 if down else 0.0

    @rule(level=st.integers(0, 1), which=jobs)
    def a_block_expires_below(self, level: int, which: int) -> None:
        blocks = self.house.inner[level].blocks
        if blocks:
            del blocks[sorted(blocks)[which % len(blocks)]]

    @rule(index=ServiceMachine.clients, length=st.integers(1, 4))
    def compute_a_prompt(self, index: int, length: int) -> None:
        """As a model does that finds nothing: all of it is sealed, then let go."""
        life = self.lives[index]
        life.client.try_begin(HASHES[:length], length, wait_s=0.0, announce=False)
        life.note(list(HASHES[:length]), self.house.clock.now_s)
        life.collect()
        self.seal(index, len(life.reserved))
        self.release(index, len(life.references) + len(life.reserved), True, True)

    @rule()
    def everything_goes_down_and_leaves_the_pool(self) -> None:
        self.lives[0].client.ask(requests.Spill)
        self.house.run_mover()
        self.lives[0].client.ask(requests.Flush, tier="pool")

    @rule(
        index=ServiceMachine.clients,
        length=st.integers(1, 4),
        wait_s=st.sampled_from([None, 0.0, 30.0]),
        how_far=st.sampled_from(["asked", "answered", "heard", "copying", "copied"]),
    )
    def a_prompt_comes_back(self, index: int, length: int, wait_s: float | None, how_far: str) -> None:
        """The way of a promotion, left at any point to what the other rules do next."""
        self.compute_a_prompt(index, length)
        self.everything_goes_down_and_leaves_the_pool()
        life, mover = self.lives[index], self.house.mover
        life.client.try_begin(HASHES[:length], length, wait_s=wait_s, announce=False)
        life.note(list(HASHES[:length]), self.house.clock.now_s)
        if how_far == "asked":
            return
        for lookup in mover.waiting(Lookup):
            mover.do(lookup)
        if how_far == "answered":
            return
        self.house.mover_done()
        if how_far == "heard":
            return
        for fill in mover.waiting(Fill):
            mover.begin(fill)
            if how_far == "copied":
                mover.end(fill)

    @rule(index=ServiceMachine.clients, length=st.integers(0, 4))
    def prefetch(self, index: int, length: int) -> None:
        self.lives[index].client.ask(requests.Prefetch, 1, pack_hashes(HASHES[:length]))

    @rule(lost=st.booleans(), which=jobs)
    def somebody_flushes(self, lost: bool, which: int) -> None:
        if lost:  # it is told, but the answer does not come back
            self.house.tiers[1].fail_next("flush", TierUnavailable("reset"), after=True)
        self.lives[0].client.ask(requests.Flush, namespace=self.lives[which % len(self.lives)].client.digest)

    @precondition(lambda self: self.house.inner[1].blocks)
    @rule(which=jobs)
    def another_daemon_flushes(self, which: int) -> None:
        digest = self.lives[which % len(self.lives)].client.digest
        self.house.inner[1].flushed_elsewhere(NamespaceDigest(digest))

    @invariant()
    def who_holds_a_block_finds_it_unchanged(self) -> None:
        for life in self.lives:
            for block in set(life.references):
                right = life.client.holds[block]  # type: ignore[attr-defined]
                assert self.house.bytes_of(life.client, block) == right, "a pinned block was lost"


TieredMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTieredMachine = TieredMachine.TestCase
