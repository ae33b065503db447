"""Opening caches: the namespace they name, the pool they are in, and what must be there before anybody uses them."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.blobs import is_blob_engine
from kvd.block import SessionId
from kvd.errors import InvalidLayout
from kvd.hashing import Namespace, namespace_digest
from kvd.layout import KVLayout
from kvd.pool import NamespaceWords, Pools
from kvd.protocol.replies import CacheOpened, Reply
from kvd.protocol.requests import OpenCache
from kvd.service.attempts import AnswerAttempt
from kvd.service.below import Below
from kvd.service.homes import Homes
from kvd.service.idle import IdleRelease
from kvd.service.pins import Pins
from kvd.service.places import Places
from kvd.service.progress import Progress
from kvd.service.sessions import Session

MIN_UNTIL_LOOK = 1024
"""Namespaces below which none is looked for that could be forgotten."""


class Opening:
    """Loop thread only."""

    def __init__(
        self,
        *,
        pools: Pools,
        homes: Homes,
        places: Places,
        sessions: Mapping[SessionId, Session],
        below: Below | None,
        pins: Pins,
        progress: Progress,
        idle: IdleRelease,
        max_caches: int,
        epoch: int,
    ) -> None:
        self._pools = pools
        self._homes = homes
        self._places = places
        self._sessions = sessions
        self._below = below
        self._pins = pins
        self._progress = progress
        self._idle = idle
        self._max_caches = max_caches
        self._epoch = epoch
        self._until_look = MIN_UNTIL_LOOK

    def open_cache(self, session: Session, request: OpenCache) -> Reply | None:
        """See `kvd.protocol.requests.OpenCache`."""
        layout = KVLayout(
            num_layers=request.num_layers,
            num_kv_heads=request.num_kv_heads,
            head_dim=request.head_dim,
            dtype=request.dtype,
            block_tokens=request.block_tokens,
        )
        if layout.block_nbytes != request.block_nbytes:
            raise InvalidLayout(
                f"the client counts {request.block_nbytes} bytes a block, the daemon {layout.block_nbytes}: they mean "
                f"different layouts"
            )
        namespace = Namespace(
            model=request.model,
            layout=layout,
            engine=request.engine,
            positional=request.positional,
            adapter=request.adapter,
            salt=request.salt,
        )
        digest = namespace_digest(namespace, session.tenant)
        asked = (digest, request.device, request.staged)
        cache = session.cache_of(asked)
        # What lies in a blob's blocks are bytes; counted as tokens they would be a figure that means nothing.
        block_tokens = 0 if is_blob_engine(request.engine) else layout.block_tokens
        if cache is None or self._homes.of(cache.pool).lost is not None:
            session.check_may_open(self._max_caches)
            pool = self._places.of_cache(session, request, layout.block_nbytes)
            if self._idle.waits(self._homes.of(pool.source or pool), session, request):
                return None
            words = NamespaceWords(
                model=request.model,
                engine=request.engine,
                adapter=request.adapter,
                has_salt=bool(request.salt),
                block_tokens=block_tokens,
                positional=request.positional,
                layout=layout,
            )
            if pool.source is not None:
                pool.source.namespace(digest, words)
            cache = session.add_cache(asked, pool, pool.namespace(digest, words), block_tokens)
            self._forget_unused()
        reply = CacheOpened(
            request.request_id,
            self._epoch,
            cache.handle,
            cache.pool.pool_id,
            digest,
            cache.pool.blocks_per_segment,
            self._pools.segment_nbytes(cache.pool.device),
            cache.pool.device,
            self._homes.of(cache.pool).pid_namespace,
            "" if cache.pool.source is None else cache.pool.source.device,
        )
        number = None if self._below is None else self._below.open(cache, layout)
        if number is None:
            return reply
        # A block sealed before its generation is known could not be told from one that a flush was to end.
        self._progress.wait_below(AnswerAttempt(session, cache, request, lambda: reply), number)
        return None

    def _forget_unused(self) -> None:
        """Looks for them only when their number has doubled, so that opening one costs O(1) on average."""
        if self._pools.num_namespaces <= self._until_look:
            return
        in_use = {cache.digest for session in self._sessions.values() for cache in session.caches.values()}
        in_use |= self._pins.namespaces()
        if self._below is not None:
            in_use |= self._below.busy_namespaces()
        forgotten = self._pools.forget_namespaces(in_use)
        if self._below is not None:
            self._below.lineages.forget(forgotten)
        self._until_look = max(MIN_UNTIL_LOOK, 2 * self._pools.num_namespaces)
