"""The requests about tiers below: how far a prefix reaches, bring it up, copy down, forget for good."""

from __future__ import annotations

from collections.abc import Callable

from kvd.block import HASH_NBYTES, NamespaceDigest
from kvd.errors import InvalidRequest, PermissionRefused
from kvd.hashing import unpack_hashes
from kvd.pool import Pools
from kvd.protocol import requests
from kvd.protocol.replies import Done, Flushed, Matched, Reply, Spilling
from kvd.service.attempts import AnswerAttempt
from kvd.service.below import Below, Reach
from kvd.service.flushing import FlushResult
from kvd.service.progress import Progress
from kvd.service.sessions import Cache, Session
from kvd.service.settings import ServiceSettings
from kvd.tiers.names import NamespaceName

POOL = "pool"
"""The name that `Flush.tier` gives the pools."""


class TierVerbs:
    """Each returns its reply, or None when that comes later. They work without a tier below, too."""

    def __init__(
        self,
        below: Below | None,
        pools: Pools,
        progress: Progress,
        settings: ServiceSettings,
        epoch: int,
        reply: Callable[[Session, Reply], None],
    ) -> None:
        """`reply` sends one that comes later, if the session still lives."""
        self._below = below
        self._pools = pools
        self._progress = progress
        self._settings = settings
        self._epoch = epoch
        self._reply = reply

    def match(self, session: Session, request: requests.Match) -> Reply | None:
        """See `kvd.protocol.requests.Match`."""
        cache = self._known(session, request.namespace) if request.namespace else session.cache(request.cache)
        hashes = unpack_hashes(request.hashes)
        reach = Reach(None, cache.pool, hashes, 0) if self._below is None else self._below.reach(cache, hashes)

        def answer() -> Reply:
            lengths = reach.by_tier()
            names = list(self._below.tier_names) if self._below is not None and lengths else []
            return Matched(request.request_id, self._epoch, reach.num_resident, names, lengths)

        if reach.number is None:
            return answer()
        self._progress.wait_below(AnswerAttempt(session, cache, request, answer), reach.number)
        return None

    def _known(self, session: Session, digest: bytes) -> Cache:
        """A namespace of the session's own tenant, opened by whomever. Raises `InvalidRequest`."""
        for pool in self._pools.all:
            namespace = pool.namespaces.get(NamespaceDigest(digest)) if pool.tenant == session.tenant else None
            if namespace is not None:
                return Cache(0, pool, namespace.digest, namespace, namespace.words.block_tokens)
        raise InvalidRequest("no such namespace is known to your tenant; `kvd status --json` lists those that are")

    def prefetch(self, session: Session, request: requests.Prefetch) -> Reply:
        """See `kvd.protocol.requests.Prefetch`."""
        cache = session.cache(request.cache)
        hashes = unpack_hashes(request.hashes)
        if self._below is not None:
            self._below.prefetch(cache, hashes)
        return Done(request.request_id, self._epoch)

    def flush(self, session: Session, request: requests.Flush) -> Reply | None:
        """See `kvd.protocol.requests.Flush`."""
        names = () if self._below is None else self._below.tier_names
        if request.tier not in {"", POOL, *names}:
            raise InvalidRequest(f"there is no tier {request.tier!r}; there are {', '.join((POOL, *names))}")
        namespaces = self._named(session, request)
        if self._below is None or request.tier == POOL:
            dropped = sum(pool.drop_namespaces(namespaces) for pool in self._pools.all)
            return Flushed(request.request_id, self._epoch, len(namespaces), dropped)

        def answer(result: FlushResult) -> Reply:
            return Flushed(
                request.request_id,
                self._epoch,
                result.num_namespaces,
                result.num_blocks,
                sorted(result.untold),
                sorted(result.unlisted),
            )

        def choose(name: NamespaceName) -> bool:
            return self.may_touch(session, name.tenant) and (not request.model or name.is_of_model(request.model))

        level = names.index(request.tier) if request.tier else None
        result = self._below.flushing.flush(
            namespaces,
            lambda result: self._reply(session, answer(result)),
            level=level,
            choose=None if request.namespace else choose,
        )
        return None if result.num_open else answer(result)

    def spill(self, session: Session, request: requests.Spill) -> Reply:
        """See `kvd.protocol.requests.Spill`."""
        pools = [pool for pool in self._pools.all if self.may_touch(session, pool.tenant)]
        if not pools and not self._is_admin(session):
            raise PermissionRefused(_REFUSED)
        if self._below is not None:
            for pool in pools:
                self._below.spilling.spill_all(pool)
        return Spilling(request.request_id, self._epoch, sum(pool.num_uncopied for pool in pools))

    def _named(self, session: Session, request: requests.Flush) -> list[NamespaceDigest]:
        """The namespaces to flush, of those known here. Raises `PermissionRefused` where nothing else could be done."""
        if request.namespace and request.model:
            raise InvalidRequest("a flush names a namespace or a model, not both")
        known = {digest: (pool, one) for pool in self._pools.all for digest, one in pool.namespaces.items()}
        if request.namespace:
            if len(request.namespace) != HASH_NBYTES:
                raise InvalidRequest(f"a namespace digest has {HASH_NBYTES} bytes, not {len(request.namespace)}")
            digest = NamespaceDigest(request.namespace)
            # Unknown ones may lie in a shared tier; whose they are cannot be told.
            if self._is_admin(session) or (digest in known and self._is_own(session, known[digest][0].tenant)):
                return [digest]
            raise PermissionRefused(_REFUSED)
        named = {digest: pool for digest, (pool, one) in known.items() if request.model in {"", one.words.model}}
        if not all(self.may_touch(session, pool.tenant) for pool in named.values()):
            named = {digest: pool for digest, pool in named.items() if self._is_own(session, pool.tenant)}
        if not named and not self._is_admin(session) and self._settings.isolation != "uid":
            raise PermissionRefused(_REFUSED)
        return list(named)

    def _is_admin(self, session: Session) -> bool:
        return self._settings.is_admin(session.identity)

    def _is_own(self, session: Session, tenant: str) -> bool:
        """Whether everything of the tenant is the session's user's own; in a group's tenant others have a share."""
        return self._settings.isolation == "uid" and session.tenant == tenant

    def may_touch(self, session: Session, tenant: str) -> bool:
        """Whether the session may do as it likes with what is the tenant's."""
        return self._is_admin(session) or self._is_own(session, tenant)


_REFUSED = "only root, the daemon's own user, or (with access.isolation = uid) the owner may do this"
