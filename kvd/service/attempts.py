"""The three requests that may have to wait: each can be tried again, and holds nothing until it succeeds."""

from __future__ import annotations

from kvd.block import BlockId, ChainHash
from kvd.pool import Grow, WaitFor
from kvd.protocol.replies import Begun, Reply, Reserved
from kvd.protocol.requests import Begin, Reserve, Retain
from kvd.protocol.wire import pack_block_ids
from kvd.service.checks import pack_checksums
from kvd.service.parking import Parked
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Cache, Session


class Attempt(Parked):
    """One request, tried until it gives a reply or an error."""

    __slots__ = ("cache", "memory_until_s", "num_segments", "request", "waits_for_blocks_until_s")

    request: Begin | Reserve | Retain

    def __init__(self, session: Session, cache: Cache, request: Begin | Reserve | Retain) -> None:
        super().__init__(session)
        self.cache = cache
        self.request = request
        self.num_segments = 0
        """Segments it still waits for, while it is parked for memory."""
        self.memory_until_s: float | None = None
        """When it stops waiting for memory; set at its first `Grow`."""
        self.waits_for_blocks_until_s: float | None = None
        """Until when it prefers waiting to `OutOfBlocks`; None for not at all."""

    def run(self, table: SegmentTable) -> Reply | WaitFor | Grow:
        """One try. On success the grants are queued already. Raises what the pool raises, with nothing changed."""
        raise NotImplementedError

    def stop_waiting_for_others(self) -> None:
        """From now on no `WaitFor`."""


class BeginAttempt(Attempt):
    """See `kvd.protocol.requests.Begin`."""

    __slots__ = ("hashes", "may_wait", "wait_until_s", "waited")

    request: Begin

    def __init__(
        self,
        session: Session,
        cache: Cache,
        request: Begin,
        hashes: list[ChainHash],
        *,
        wait_until_s: float | None,
        keeps_waiting_for_blocks: bool,
    ) -> None:
        """`wait_until_s` None for never waiting."""
        super().__init__(session, cache, request)
        self.hashes = hashes
        self.may_wait = wait_until_s is not None
        self.wait_until_s = wait_until_s or 0.0
        self.waited = False
        if keeps_waiting_for_blocks:
            self.waits_for_blocks_until_s = wait_until_s

    def stop_waiting_for_others(self) -> None:
        self.may_wait = False

    def run(self, table: SegmentTable) -> Reply | WaitFor | Grow:
        request, session, cache = self.request, self.session, self.cache
        pool = cache.pool
        outcome = pool.begin(
            session.id,
            cache.namespace,
            self.hashes,
            max_cached=request.max_cached,
            num_blocks=request.num_blocks,
            announce=request.announce,
            may_wait=self.may_wait,
        )
        if isinstance(outcome, (WaitFor, Grow)):
            return outcome
        blocks, num_cached = outcome.blocks, outcome.num_cached
        cached = blocks[:num_cached]
        table.grant(session, pool, readable=cached, writable=blocks[num_cached:])
        session.tokens_saved += num_cached * cache.block_tokens
        return Begun(
            request.request_id,
            request.epoch,
            num_cached,
            pack_block_ids(blocks),
            outcome.num_announced,
            self.waited,
            pack_checksums(pool.checksums(session.id, cached)) if request.with_checksums else b"",
        )


class ReserveAttempt(Attempt):
    """See `kvd.protocol.requests.Reserve`."""

    __slots__ = ("num_blocks",)

    def __init__(self, session: Session, cache: Cache, request: Reserve) -> None:
        super().__init__(session, cache, request)
        self.num_blocks = request.num_blocks

    def run(self, table: SegmentTable) -> Reply | WaitFor | Grow:
        outcome = self.cache.pool.reserve(self.session.id, self.num_blocks)
        return outcome if isinstance(outcome, Grow) else _reserved(self, outcome, table)


class RetainAttempt(Attempt):
    """See `kvd.protocol.requests.Retain`."""

    __slots__ = ("blocks", "num_blocks")

    def __init__(self, session: Session, cache: Cache, request: Retain, blocks: tuple[BlockId, ...]) -> None:
        super().__init__(session, cache, request)
        self.blocks = blocks
        self.num_blocks = request.num_blocks

    def run(self, table: SegmentTable) -> Reply | WaitFor | Grow:
        outcome = self.cache.pool.retain(self.session.id, self.blocks, self.num_blocks)
        return outcome if isinstance(outcome, Grow) else _reserved(self, outcome, table)


def _reserved(attempt: Attempt, blocks: list[BlockId], table: SegmentTable) -> Reserved:
    table.grant(attempt.session, attempt.cache.pool, writable=blocks)
    return Reserved(attempt.request.request_id, attempt.request.epoch, pack_block_ids(blocks))
