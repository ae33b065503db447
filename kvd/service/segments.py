"""Whose memory a segment is, and which sessions may open it."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvd.block import HOST, BlockId, SegmentId, SessionId
from kvd.errors import KvdError
from kvd.memory import BlockMemory, DeviceBlock, DeviceSegment, HostBlock, HostSegment
from kvd.pool import DroppedSegment, Pool, Pools
from kvd.protocol.session import DeviceSegmentGranted, SegmentGranted, SegmentRevoked
from kvd.service.draining import Draining
from kvd.service.homes import Home, Homes
from kvd.service.outbox import Outgoing, SendGrant, SendRevoke
from kvd.service.sessions import Session

_HUGE_PAGE_NBYTES = 2 << 20


class SegmentTable:
    """Every segment that belongs to a pool, and the grants and revokes that follow from what replies name.

    A descriptor or handle leaves only towards sessions of the pool's tenant, for it leaves only with a block of that
    pool.
    """

    def __init__(self, homes: Homes, pools: Pools, outbox: deque[Outgoing], epoch: int) -> None:
        self._homes = homes
        self._pools = pools
        self._outbox = outbox
        self._epoch = epoch
        self._segments: dict[tuple[int, SegmentId], HostSegment | DeviceSegment] = {}
        self._num_segments: Counter[int] = Counter()
        """By pool."""
        self._draining = Draining()
        self._lingering: dict[SessionId, Session] = {}
        """Ended ones whose processes may map segments of a card."""

    def __len__(self) -> int:
        return len(self._segments)

    def grow(self, pool: Pool, num_segments: int) -> int:
        """Gives the pool up to `num_segments` that are ready; how many it got.

        Raises what `Pool.add_segment` raises; the memory taken for it goes back.
        """
        stock = self._homes.of(pool).stock
        for num_given in range(num_segments):
            segment = stock.take(huge_pages=wants_huge_pages(pool))
            if segment is None:
                return num_given
            try:
                segment_id = pool.add_segment()
            except KvdError:
                stock.discard(segment)
                raise
            self._segments[pool.pool_id, segment_id] = segment
            self._num_segments[pool.pool_id] += 1
        return num_segments

    def grant(
        self, session: Session, pool: Pool, *, readable: Sequence[BlockId] = (), writable: Sequence[BlockId] = ()
    ) -> None:
        """Queues what the session lacks to map these blocks; call it before the reply is queued."""
        pool_id, size = pool.pool_id, pool.blocks_per_segment
        granted = session.granted[pool_id]
        if pool.device != HOST:
            # Whoever can open device memory can write it.
            readable, writable = (*readable, *writable), ()
        if writable:
            # First, since a writable descriptor also serves those who read.
            granted_writable = session.granted_writable[pool_id]
            for segment_id in _unknown_segments(writable, size, granted_writable):
                self._grant(session, pool, segment_id, writable=True)
                granted_writable.add(segment_id)
                granted.add(segment_id)
        # Whoever has them all, as sessions soon do, lacks none: a look at every block is a tenth of a long begin.
        if readable and len(granted) < self._num_segments[pool_id]:
            for segment_id in _unknown_segments(readable, size, granted):
                self._grant(session, pool, segment_id, writable=False)
                granted.add(segment_id)

    def memory(self, pool: Pool, block: BlockId) -> BlockMemory:
        """The bytes of one block, for a copy. Whoever takes it releases it while the block is still held."""
        segment_id, index = divmod(block, pool.blocks_per_segment)
        segment = self._segments[pool.pool_id, SegmentId(segment_id)]
        if isinstance(segment, DeviceSegment):
            return DeviceBlock(self._homes.of(pool).engine, segment, index * pool.block_nbytes, pool.block_nbytes)
        return HostBlock(segment.view(index * pool.block_nbytes, pool.block_nbytes))

    def drop(self, dropped: DroppedSegment, sessions: Iterable[Session]) -> None:
        """Revokes a segment that left its pool, and gives its memory back: at once, for nobody maps a block of it.

        Memory of a card goes back when every session that could map it has said that it does not.
        """
        pool_id, segment_id = place = dropped.pool_id, dropped.segment_id
        revoked = SegmentRevoked(pool=pool_id, segment=segment_id)
        told: list[SessionId] = []
        for session in (*sessions, *self._lingering.values()):
            granted = session.granted.get(pool_id)
            if granted is not None and segment_id in granted:
                granted.remove(segment_id)
                session.granted_writable[pool_id].discard(segment_id)
                if session.id not in self._lingering:
                    self._outbox.append(SendRevoke(session.id, revoked))
                told.append(session.id)
        self._num_segments[pool_id] -= 1
        segment = self._segments.pop(place)
        home = self._homes.of(self._pools.get(pool_id))
        if isinstance(segment, DeviceSegment):
            self._draining.begin(place, home, segment, told)
            self._count_draining(home)
        else:
            home.stock.discard(segment)

    def closed(self, session: SessionId, pool_id: int, segment: int) -> bool:
        """The session maps a revoked segment no more. Whether memory went back by that.

        Raises `KeyError` when it was not asked to close that one.
        """
        home = self._draining.closed(session, (pool_id, SegmentId(segment)))
        if home is not None:
            self._count_draining(home)
        return home is not None

    def session_lingers(self, session: Session) -> bool:
        """It ended, and its process may map what it was granted of a card; whether that is anything."""
        on_cards = any(segments and self._is_on_card(pool) for pool, segments in session.granted.items())
        if on_cards or self._draining.waits_for(session.id):
            self._lingering[session.id] = session
            return True
        return False

    def session_ended(self, session: SessionId) -> None:
        """It maps nothing any more."""
        self._lingering.pop(session, None)
        for home in self._draining.session_ended(session):
            self._count_draining(home)

    def is_draining(self, device: str) -> bool:
        """Whether memory of the device is on its way back from clients."""
        return self._draining.num_segments(device) > 0

    def may_be_mapped(self, device: str) -> bool:
        """Whether a client whose session is no more may map memory of the device."""
        return self.is_draining(device) or any(
            segments and self._pools.get(pool).device == device
            for session in self._lingering.values()
            for pool, segments in session.granted.items()
        )

    def to_close(self, session: SessionId) -> dict[int, int]:
        """By pool id: segments that the session was told to close and has not."""
        return Counter(pool_id for pool_id, _ in self._draining.waits_for(session))

    def close(self) -> None:
        """Lets go of every segment, for the end of the daemon: clients read their mappings until they close them."""
        for segment in self._segments.values():
            segment.let_go()
        self._segments.clear()
        self._draining.close()

    def _is_on_card(self, pool_id: int) -> bool:
        return self._pools.get(pool_id).device != HOST

    def _count_draining(self, home: Home) -> None:
        self._pools.set_draining(home.device, self._draining.num_segments(home.device))

    def _grant(self, session: Session, pool: Pool, segment_id: SegmentId, *, writable: bool) -> None:
        segment = self._segments[pool.pool_id, segment_id]
        if isinstance(segment, DeviceSegment):
            handle = DeviceSegmentGranted(
                pool=pool.pool_id,
                segment=segment_id,
                nbytes=segment.nbytes,
                device=pool.device,
                handle=segment.handle,
                pid_namespace=self._homes.of(pool).pid_namespace,
                pid=os.getpid(),
                epoch=self._epoch,
            )
            self._outbox.append(SendGrant(session.id, handle, None))
        else:
            message = SegmentGranted(pool=pool.pool_id, segment=segment_id, nbytes=segment.nbytes, writable=writable)
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
