"""The requests of sequences: begin one, reserve or share blocks for it, seal them, give them back."""

from __future__ import annotations

from collections.abc import Callable

from kvd.hashing import unpack_hashes
from kvd.protocol import requests
from kvd.protocol.replies import Done, Reply, Sealed
from kvd.protocol.wire import MAX_IDS_PER_RELEASE, pack_block_ids
from kvd.service.attempts import BeginAttempt, ReserveAttempt, RetainAttempt
from kvd.service.below import Below
from kvd.service.checks import check_begin, check_num_blocks, check_wait_s, unpack_checksums, unpack_ids
from kvd.service.homes import Homes
from kvd.service.pins import Pins
from kvd.service.progress import Progress
from kvd.service.savings import Savings
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Session
from kvd.service.settings import ServiceSettings


class SequenceVerbs:
    """What needs blocks that others may have to give first is an attempt: `progress` carries it out, now or later."""

    def __init__(
        self,
        *,
        progress: Progress,
        below: Below | None,
        pins: Pins,
        savings: Savings,
        homes: Homes,
        table: SegmentTable,
        settings: Callable[[], ServiceSettings],
        epoch: int,
        clock: Callable[[], float],
    ) -> None:
        """`settings` gives those of the moment: how long a begin waits may change while the daemon runs."""
        self._progress = progress
        self._below = below
        self._pins = pins
        self._savings = savings
        self._homes = homes
        self._table = table
        self._settings = settings
        self._epoch = epoch
        self._clock = clock

    def begin(self, session: Session, request: requests.Begin) -> None:
        """See `kvd.protocol.requests.Begin`."""
        cache = session.cache(request.cache)
        hashes = unpack_hashes(request.hashes)
        check_begin(
            num_hashes=len(hashes),
            max_cached=request.max_cached,
            num_blocks=request.num_blocks,
            whole=request.whole,
        )
        settings = self._settings()
        wait_s = settings.default_wait_s if request.wait_s is None else check_wait_s(request.wait_s)
        wait_s = min(wait_s, settings.max_wait_s)
        attempt = BeginAttempt(
            session,
            cache,
            request,
            hashes,
            wait_until_s=self._clock() + wait_s if wait_s > 0 else None,
            keeps_waiting_for_blocks=request.wait_s is not None,
            ask_below=self._below is not None,
        )
        self._progress.advance(attempt)

    def reserve(self, session: Session, request: requests.Reserve) -> None:
        """See `kvd.protocol.requests.Reserve`."""
        check_num_blocks(request.num_blocks)
        self._progress.advance(ReserveAttempt(session, session.cache(request.cache), request))

    def retain(self, session: Session, request: requests.Retain) -> None:
        """See `kvd.protocol.requests.Retain`."""
        check_num_blocks(request.num_blocks, at_least=0)
        blocks = unpack_ids(request.blocks)
        self._progress.advance(RetainAttempt(session, session.cache(request.cache), request, blocks))

    def seal(self, session: Session, request: requests.Seal) -> Reply:
        """See `kvd.protocol.requests.Seal`."""
        cache = session.cache(request.cache)
        self._homes.of(cache.pool).check()
        blocks = unpack_ids(request.blocks)
        hashes = unpack_hashes(request.hashes)
        checksums = unpack_checksums(request.checksums, len(blocks))
        self._savings.check(session, request.computed_tokens, request.computed_s, self._clock())
        sealed = cache.pool.seal(
            session.id, cache.namespace, blocks, hashes, checksums if self._settings().checksums else None
        )
        self._savings.computed(cache, request.computed_tokens, request.computed_s)
        if sealed:
            self._table.grant(session, cache.pool, readable=sealed)
        if self._below is not None:
            self._below.sealed(cache.pool, cache.digest, hashes)
        self._pins.look()
        return Sealed(request.request_id, self._epoch, pack_block_ids(sealed))

    def release(self, session: Session, request: requests.Release) -> Reply | None:
        """See `kvd.protocol.requests.Release`."""
        cache = session.cache(request.cache)
        cache.pool.release(
            session.id,
            blocks=unpack_ids(request.blocks, MAX_IDS_PER_RELEASE),
            reserved=unpack_ids(request.reserved, MAX_IDS_PER_RELEASE),
            hashes=unpack_hashes(request.hashes),
        )
        self._progress.blocks_came_back = True
        if self._below is not None:
            self._below.blocks_moved([cache.pool])
        return Done(request.request_id, self._epoch) if request.ack else None
