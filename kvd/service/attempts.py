"""The requests that may have to wait: each can be tried again, and holds nothing until it succeeds."""

from __future__ import annotations

import abc
from collections.abc import Callable

from kvd.block import BlockId, ChainHash
from kvd.pool import AskBelow, Grow, WaitFor
from kvd.protocol.replies import Begun, Reply, Reserved
from kvd.protocol.requests import Begin, Request, Reserve, Retain
from kvd.protocol.wire import pack_block_ids
from kvd.service.checks import pack_checksums
from kvd.service.parking import Parked
from kvd.service.promotion import Promotion
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Cache, Session


class Attempt(Parked, abc.ABC):
    """One request, tried until it gives a reply or an error."""

    __slots__ = (
        "below_until_s",
        "cache",
        "memory_until_s",
        "num_segments",
        "promotion",
        "request",
        "transit_until_s",
        "waits_for_blocks_until_s",
    )

    request: Request

    def __init__(self, session: Session, cache: Cache, request: Request) -> None:
        super().__init__(session)
        self.cache = cache
        self.request = request
        self.num_segments = 0
        """Segments it still waits for, while it is parked for memory."""
        self.memory_until_s: float | None = None
        """When it stops waiting for memory; set at its first `Grow`."""
        self.waits_for_blocks_until_s: float | None = None
        """Until when it prefers waiting to `OutOfBlocks`; None for not at all."""
        self.transit_until_s: float | None = None
        """Until when it waits for blocks that copies hold; set at the first `OutOfBlocks` that finds some."""
        self.below_until_s: float | None = None
        """Until when it is patient with what could not be asked below yet; set when it first waits for that."""
        self.promotion: Promotion | None = None
        """What is brought up for it; it is left when this attempt ends, or waits for other sessions."""

    @abc.abstractmethod
    def run(self, table: SegmentTable) -> Reply | WaitFor | AskBelow | Grow:
        """One try. On success the grants are queued already. Raises what the pool raises, with nothing changed."""

    def stop_waiting_for_others(self) -> None:
        """From now on no `WaitFor` and no `AskBelow`."""


class BeginAttempt(Attempt):
    """See `kvd.protocol.requests.Begin`."""

    __slots__ = ("ask_below", "hashes", "may_wait", "wait_until_s", "waited")

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
        ask_below: bool,
    ) -> None:
        """`wait_until_s` None for never waiting. `ask_below`: there are tiers that may have what is missing here."""
        super().__init__(session, cache, request)
        self.hashes = hashes
        self.may_wait = wait_until_s is not None
        self.wait_until_s = wait_until_s or 0.0
        self.waited = False
        self.ask_below = ask_below
        if keeps_waiting_for_blocks:
            self.waits_for_blocks_until_s = wait_until_s

    def stop_waiting_for_others(self) -> None:
        self.may_wait = self.ask_below = False

    @property
    def wanted(self) -> list[ChainHash]:
        """The hashes whose blocks it would take."""
        return self.hashes[: min(self.request.max_cached, self.request.num_blocks)]

    def run(self, table: SegmentTable) -> Reply | WaitFor | AskBelow | Grow:
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
            ask_below=self.ask_below,
            whole=request.whole,
            only_stores=request.only_stores,
        )
        if isinstance(outcome, (WaitFor, AskBelow, Grow)):
            return outcome
        blocks, num_cached = outcome.blocks, outcome.num_cached
        cached = blocks[:num_cached]
        table.grant(session, pool, readable=cached, writable=blocks[num_cached:])
        if num_cached and not request.whole and not request.only_stores:  # what is wanted whole are bytes, not tokens
            session.saved[cache.handle] += num_cached * cache.block_tokens
        return Begun(
            request.request_id,
            request.epoch,
            num_cached,
            pack_block_ids(blocks),
            outcome.num_announced,
            self.waited,
            pack_checksums(pool.checksums(session.id, cached)) if request.with_checksums else b"",
        )


class AnswerAttempt(Attempt):
    """A request whose reply waits for an answer from below, and says what is known by then."""

    __slots__ = ("_answer",)

    def __init__(self, session: Session, cache: Cache, request: Request, answer: Callable[[], Reply]) -> None:
        super().__init__(session, cache, request)
        self._answer = answer

    def run(self, table: SegmentTable) -> Reply:
        return self._answer()


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
