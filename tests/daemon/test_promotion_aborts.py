"""Whoever waits for blocks on their way up goes away: in every order of that and the copies' end nothing leaks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvd_client
import kvd_client.aio
from kvd.hashing import chain_hashes, encode_tokens, pack_hashes
from kvd.protocol import requests
from kvd.status import PoolStatus, Snapshot
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.client.processes import Worker
from tests.support.daemon import Daemon, running_daemon
from tests.support.raw_client import RawClient
from tests.support.redis_servers import RealServer, running_server
from tests.support.slow_link import SlowLink, slow_link
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("either_home")
PROMPT = list(range(1, 162))
NUM_CACHED = 160
NUM_BLOCKS = 10
SEGMENT_NBYTES = 2 << 20
"""As small as a card's may be."""
PATIENT = {"PATIENCE_WITH_REDIS_S": "20"}
"""The link is a thread of this process, which may have to wait for a processor."""
OPENING = {"model": MODEL, "engine": "raw/1", "positional": "", "adapter": "", "salt": ""}


@pytest.fixture
def server() -> Iterator[RealServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def link(server: RealServer) -> Iterator[SlowLink]:
    with slow_link(server) as link:
        yield link


@pytest.fixture
def daemon(tmp_path: Path, server: RealServer, link: SlowLink) -> Iterator[Daemon]:
    """The prompt lies in Redis, put there by an earlier daemon."""
    with running_daemon(tmp_path, name="before", environ=PATIENT, tiers={"redis": {"url": server.url}}) as before:
        assert begin(before) == 0
    tiers: dict[str, Any] = {"redis": {"url": link.url}, "drain_s": 0.0}
    with running_daemon(tmp_path, segment=SEGMENT_NBYTES, environ=PATIENT, tiers=tiers) as daemon:
        yield daemon


def begin(daemon: Daemon) -> int:
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence(PROMPT, wait_s=20) as seq:
            num_cached = seq.num_cached_tokens
            assert holds(seq, PROMPT, num_cached)
            fill(seq, PROMPT)
            seq.commit()
    return num_cached


def snapshot(daemon: Daemon) -> Snapshot:
    with kvd_client.connect(daemon.folder) as client:
        return client.status()


def pool(daemon: Daemon) -> PoolStatus:
    (found,) = snapshot(daemon).pools
    return found


def is_alone(daemon: Daemon) -> bool:
    return len(snapshot(daemon).clients) == 1  # who asks


def nothing_is_left(daemon: Daemon) -> None:
    """Every copy has ended, nobody holds anything, every block can be had; and the prompt still is what it was."""
    eventually(lambda: (pool(daemon).num_filling, pool(daemon).num_referenced) == (0, 0))
    with kvd_client.connect(daemon.folder) as client:
        client.check()
        client.flush(model=MODEL, tier="pool")
        client.check()
        (found,) = client.status().pools
        assert (found.num_reserved, found.num_references, found.num_sealed) == (0, 0, 0)
        assert found.num_free == found.num_segments * (SEGMENT_NBYTES // LAYOUT.block_nbytes)
    assert begin(daemon) == NUM_CACHED
    with kvd_client.connect(daemon.folder) as client:
        client.check()


class Waiting:
    """A begin that waits for the copies: of the client library in a process of its own, or of a bare session here."""

    def __init__(self, daemon: Daemon, how: str) -> None:
        self.worker = Worker(daemon.folder) if how == "killed" else None
        self.raw = RawClient(daemon.folder) if how == "closed" else None
        if self.worker is not None:
            self.worker.send("begin", tokens=PROMPT, wait_s=30)
        if self.raw is not None:
            opening = OPENING | {"block_nbytes": LAYOUT.block_nbytes} | dataclasses.asdict(LAYOUT)
            opened = self.raw.ask(requests.OpenCache, **opening)
            self.cache = opened.cache
            self.hashes = pack_hashes(chain_hashes(opened.digest, encode_tokens(PROMPT), LAYOUT.block_tokens))
            self.raw.post(
                requests.Begin, self.cache, self.hashes, max_cached=NUM_BLOCKS, num_blocks=NUM_BLOCKS + 1, wait_s=30.0
            )

    def stops_listening(self) -> None:
        if self.worker is not None:
            self.worker.stop()

    def goes(self, *, gives_back: bool = False) -> None:
        if self.worker is not None:
            self.worker.kill()
        if self.raw is not None:
            if gives_back:
                # What a waiting begin does not hold yet can be given back without a fault, and it waits on.
                self.raw.post(requests.Release, self.cache, hashes=self.hashes)
            self.raw.close()


@pytest.mark.parametrize("num_before", [0, 1], ids=["all on their way", "some here"])
@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("copies", ["arrive later", "fail later"])
def test_gone_before_the_copies_end(  # case B11
    daemon: Daemon, link: SlowLink, num_before: int, how: str, copies: str
) -> None:
    link.hold(after=num_before)
    waiting = Waiting(daemon, how)
    link.wait_held()
    assert pool(daemon).num_filling > 0
    waiting.goes(gives_back=True)
    eventually(lambda: is_alone(daemon))
    assert pool(daemon).num_filling > 0, "a copy that runs keeps its block"
    if copies == "fail later":
        link.cut()
    else:
        link.release()
    eventually(lambda: pool(daemon).counters["failed_fills" if copies == "fail later" else "fills"] > 0)
    nothing_is_left(daemon)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_gone_after_the_copies_ended(daemon: Daemon, link: SlowLink, how: str) -> None:  # case B11
    """The reply is on its way to a client that never reads it."""
    link.hold()
    waiting = Waiting(daemon, how)
    link.wait_held()
    waiting.stops_listening()
    link.release()
    eventually(lambda: pool(daemon).num_referenced == NUM_BLOCKS)
    waiting.goes()
    eventually(lambda: is_alone(daemon))
    nothing_is_left(daemon)
    assert pool(daemon).counters["fills"] >= NUM_BLOCKS


async def test_cancelled_while_the_copies_run(daemon: Daemon, link: SlowLink) -> None:  # case B11
    """The session lives on: what the daemon still answers is given back by itself."""
    async with kvd_client.aio.connect(daemon.folder) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT)
        link.hold()
        waiting = asyncio.create_task(cache.sequence(PROMPT, wait_s=30))
        await asyncio.to_thread(link.wait_held)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        link.release()
        await asyncio.to_thread(nothing_is_left, daemon)
        async with await cache.sequence(PROMPT) as seq:
            assert holds(seq, PROMPT, NUM_CACHED)
