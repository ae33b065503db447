"""Whose memory a segment is, and which sessions hold descriptors of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvd.block import BlockId, SegmentId
from kvd.errors import KvdError
from kvd.memory import HostSegment
from kvd.pool import DroppedSegment, Pool
from kvd.protocol.session import SegmentGranted, SegmentRevoked
from kvd.service.outbox import Outgoing, SendGrant, SendRevoke
from kvd.service.sessions import Session

_HUGE_PAGE_NBYTES = 2 << 20


class Stock(Protocol):
    """Where memory comes from; `kvd.memory.SegmentStock` is one, and says what each member promises."""

    segment_nbytes: int

    @property
    def failed(self) -> str | None: ...
    @property
    def ready_nbytes(self) -> int: ...
    def take(self, *, huge_pages: bool = False) -> HostSegment | None: ...
    def request(self, num_segments: int, *, huge_pages: bool = False) -> None: ...
    def withdraw(self) -> None: ...
    def discard(self, segment: HostSegment) -> None: ...
    def retry(self) -> None: ...
    def set_budget(self, budget_nbytes: int) -> None: ...
    def available_nbytes(self) -> int: ...


class SegmentTable:
    """Every segment that belongs to a pool, and the grants and revokes that follow from what replies name.

    A descriptor leaves only towards sessions of the pool's tenant, for it leaves only with a block of that pool.
    """

    def __init__(self, stock: Stock, outbox: deque[Outgoing]) -> None:
        self._stock = stock
        self._outbox = outbox
        self._segments: dict[tuple[int, SegmentId], HostSegment] = {}
        self._num_segments: Counter[int] = Counter()
        """By pool."""

    def __len__(self) -> int:
        return len(self._segments)

    def grow(self, pool: Pool, num_segments: int) -> int:
        """Gives the pool up to `num_segments` that are ready; how many it got.

        Raises what `Pool.add_segment` raises; the memory taken for it goes back.
        """
        for num_given in range(num_segments):
            segment = self._stock.take(huge_pages=wants_huge_pages(pool))
            if segment is None:
                return num_given
            try:
                segment_id = pool.add_segment()
            except KvdError:
                self._stock.discard(segment)
                raise
            self._segments[pool.pool_id, segment_id] = segment
            self._num_segments[pool.pool_id] += 1
        return num_segments

    def grant(
        self, session: Session, pool: Pool, *, readable: Sequence[BlockId] = (), writable: Sequence[BlockId] = ()
    ) -> None:
        """Queues the descriptors that the session lacks to map these blocks; call it before the reply is queued."""
        pool_id, size = pool.pool_id, pool.blocks_per_segment
        granted = session.granted[pool_id]
        if writable:
            # First, since a writable descriptor also serves those who read.
            granted_writable = session.granted_writable[pool_id]
            for segment_id in _unknown_segments(writable, size, granted_writable):
                self._grant(session, pool_id, segment_id, writable=True)
                granted_writable.add(segment_id)
                granted.add(segment_id)
        # Whoever has them all, as sessions soon do, lacks none: a look at every block is a tenth of a long begin.
        if readable and len(granted) < self._num_segments[pool_id]:
            for segment_id in _unknown_segments(readable, size, granted):
                self._grant(session, pool_id, segment_id, writable=False)
                granted.add(segment_id)

    def view(self, pool: Pool, block: BlockId) -> memoryview:
        """The bytes of one block, for a copy. Whoever takes it releases it while the block is still held."""
        segment_id, index = divmod(block, pool.blocks_per_segment)
        segment = self._segments[pool.pool_id, SegmentId(segment_id)]
        return segment.view(index * pool.block_nbytes, pool.block_nbytes)

    def drop(self, dropped: DroppedSegment, sessions: Iterable[Session]) -> None:
        """Revokes a segment that left its pool and gives its memory back. Nobody maps a block of it any more."""
        pool_id, segment_id = dropped.pool_id, dropped.segment_id
        for session in sessions:
            granted = session.granted.get(pool_id)
            if granted is not None and segment_id in granted:
                granted.remove(segment_id)
                session.granted_writable[pool_id].discard(segment_id)
                revoked = SegmentRevoked(pool=pool_id, segment=segment_id)
                self._outbox.append(SendRevoke(session.id, revoked))
        self._num_segments[pool_id] -= 1
        self._stock.discard(self._segments.pop((pool_id, segment_id)))

    def close(self) -> None:
        """Lets go of every segment, for the end of the daemon: clients read their mappings until they close them."""
        for segment in self._segments.values():
            segment.let_go()
        self._segments.clear()

    def _grant(self, session: Session, pool_id: int, segment_id: SegmentId, *, writable: bool) -> None:
        segment = self._segments[pool_id, segment_id]
        message = SegmentGranted(pool=pool_id, segment=segment_id, nbytes=segment.nbytes, writable=writable)
        descriptor = segment.writable_fd if writable else segment.read_only_fd
        self._outbox.append(SendGrant(session.id, message, descriptor))


def wants_huge_pages(pool: Pool) -> bool:
    """Whether the pool's blocks can be mapped one by one out of huge pages."""
    return pool.block_nbytes % _HUGE_PAGE_NBYTES == 0


def _unknown_segments(blocks: Sequence[BlockId], blocks_per_segment: int, known: set[int]) -> list[SegmentId]:
    # The usual case, all known, costs two passes in C instead of one in Python.
    if known.issuperset(range(min(blocks) // blocks_per_segment, max(blocks) // blocks_per_segment + 1)):
        return []
    named = {block // blocks_per_segment for block in blocks}
    return [SegmentId(segment) for segment in sorted(named - known)]
