"""The requests that look after what is cached: keep a prompt, let it go, flush, verify."""

from __future__ import annotations

from collections.abc import Callable

from kvd.errors import PermissionRefused
from kvd.hashing import unpack_hashes
from kvd.mover import Mover
from kvd.pool import Pools
from kvd.protocol import requests
from kvd.protocol.replies import Done, Pinned, Reply, Verified
from kvd.service.pins import Pins, check_name
from kvd.service.progress import Progress
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Cache, Session
from kvd.service.settings import ServiceSettings
from kvd.service.verifying import verify, verify_left


class UpkeepVerbs:
    """Each returns its reply, or None when that comes later."""

    def __init__(
        self,
        *,
        pins: Pins,
        pools: Pools,
        table: SegmentTable,
        progress: Progress,
        settings: ServiceSettings,
        epoch: int,
        flush: Callable[[Session, requests.Flush], Reply | None],
        mover: Mover | None,
        send_late: Callable[[Session, Reply], None],
    ) -> None:
        """`flush` carries a flush out; pins are seen to here."""
        self._pins = pins
        self._pools = pools
        self._table = table
        self._progress = progress
        self._settings = settings
        self._epoch = epoch
        self._flush = flush
        self._mover = mover
        self._send_late = send_late

    def pin(self, session: Session, request: requests.Pin) -> Reply:
        """See `kvd.protocol.requests.Pin`."""
        cache = session.cache(request.cache)
        source = cache.pool.source
        if source is not None:
            # What stands beside a card is filled from there: that is where a prompt is kept.
            cache = Cache(0, source, cache.digest, source.namespaces[cache.digest], cache.block_tokens)
        pin = self._pins.pin(session, cache, unpack_hashes(request.hashes), request.label)
        lasting = self._pins.status(pin).is_lasting
        return Pinned(request.request_id, self._epoch, pin.record.pin, len(pin.hashes), pin.num_held, lasting)

    def unpin(self, session: Session, request: requests.Unpin) -> Reply:
        """See `kvd.protocol.requests.Unpin`."""
        self._pins.unpin(session, check_name(request.pin))
        self._progress.blocks_came_back = True
        return Done(request.request_id, self._epoch)

    def flush(self, session: Session, request: requests.Flush) -> Reply | None:
        """See `kvd.protocol.requests.Flush`. What is flushed is held no longer."""
        reply = self._flush(session, request)
        self._pins.look()
        self._progress.blocks_came_back = True
        return reply

    def verify(self, session: Session, request: requests.Verify) -> Reply | None:
        """See `kvd.protocol.requests.Verify`."""
        if not self._settings.is_admin(session.identity):
            raise PermissionRefused("only root and the daemon's own user may have the blocks verified")
        step = verify(self._pools, self._table, request.cursor)

        def answer() -> Reply:
            return Verified(
                request.request_id, self._epoch, step.cursor, step.num_verified, step.num_unchecked, step.corrupt
            )

        if not step.left or self._mover is None:
            return answer()
        verify_left(step, self._table, self._mover, lambda: self._send_late(session, answer()))
        return None
