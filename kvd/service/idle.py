"""Cards that nobody uses are given back, and come back when somebody wants them: a card with a context burns watts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvd.block import SessionId
from kvd.errors import CudaUnavailable, KvdError
from kvd.pool import Pools
from kvd.protocol.requests import OpenCache
from kvd.service.homes import Card, Home, Homes
from kvd.service.sessions import Session
from kvd.service.spilling import Spilling

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiter:
    session: Session
    request: OpenCache
    until_s: float


@dataclass(slots=True)
class _Rest:
    """How one card's home stands."""

    home: Home
    card: Card
    idle_since_s: float | None = None
    leaves_until_s: float | None = None
    """While it is being emptied: when copying has taken long enough."""
    waiters: list[_Waiter] = field(default_factory=list)


class IdleRelease:
    """Loop thread only. A card is used while a session has a cache on it, or on the host memory beside it, and while a
    pin holds blocks there.

    What has no copy below is copied down first, as far as it can be within `bound_s`; then its pools are emptied and
    the card is closed, on a thread. Who opens a cache there waits until it is back, `patience_s` at most.
    """

    def __init__(
        self,
        *,
        homes: Homes,
        pools: Pools,
        sessions: Mapping[SessionId, Session],
        spilling: Spilling | None,
        may_be_mapped: Callable[[str], bool],
        settle: Callable[[], None],
        again: Callable[[Session, OpenCache], None],
        fail: Callable[[Session, OpenCache, KvdError], None],
        idle_s: float,
        bound_s: float,
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`idle_s` is how long a card stays that nobody uses, 0 for good. `again` carries a request out anew."""
        self._pools = pools
        self._sessions = sessions
        self._spilling = spilling
        self._may_be_mapped = may_be_mapped
        self._settle = settle
        self._again = again
        self._fail = fail
        self._idle_s = idle_s
        self._bound_s = bound_s
        self._patience_s = patience_s
        self._clock = clock
        self._rests = {home.device: _Rest(home, home.card) for home in homes if home.card is not None}

    @property
    def next_deadline_s(self) -> float | None:
        """When `go_on` has something to do."""
        deadlines = []
        for rest in self._rests.values():
            deadlines += [waiter.until_s for waiter in rest.waiters]
            if rest.home.lost is not None:
                continue
            if rest.leaves_until_s is not None:
                deadlines.append(rest.leaves_until_s)
            elif rest.idle_since_s is not None:
                deadlines.append(rest.idle_since_s + self._idle_s)
        return min(deadlines, default=None)

    def waits(self, home: Home, session: Session, request: OpenCache) -> bool:
        """Whether the card is away; then the request is carried out when it is back."""
        rest = self._rests.get(home.device)
        if rest is None or rest.card.stock.is_open:
            return False
        rest.waiters.append(_Waiter(session, request, self._clock() + self._patience_s))
        self._bring_back(rest)
        return True

    def go_on(self) -> None:
        """After whatever may have made a card idle, wanted, empty, closed or open."""
        for rest in self._rests.values():
            self._give_up_waiting(rest)
            if rest.card.stock.is_changing:
                continue
            if not rest.card.stock.is_open:
                self._bring_back(rest)
            elif rest.waiters:
                self._is_back(rest)
            elif self._idle_s and rest.home.lost is None:
                self._look_at(rest)

    def _give_up_waiting(self, rest: _Rest) -> None:
        now_s = self._clock()
        for waiter in [one for one in rest.waiters if one.until_s <= now_s]:
            rest.waiters.remove(waiter)
            error = CudaUnavailable(f"{rest.home.device} did not come back within {self._patience_s:g} s")
            self._tell(waiter, error)

    def _bring_back(self, rest: _Rest) -> None:
        stock = rest.card.stock
        if stock.is_changing:
            return
        # Whoever asks next has it tried again, also where nobody is left to be told.
        failure, stock.failure = stock.failure, None
        if failure is None:
            if rest.waiters:
                _log.info("%s is wanted again", rest.home.device)
                stock.restore()
            return
        _log.warning("%s did not come back: %s", rest.home.device, failure)
        waiters, rest.waiters = rest.waiters, []
        for waiter in waiters:
            self._tell(waiter, failure)

    def _is_back(self, rest: _Rest) -> None:
        rest.home.stock.set_budget(self._pools.usage(rest.home.device).budget_nbytes)
        rest.idle_since_s = rest.leaves_until_s = None
        waiters, rest.waiters = rest.waiters, []
        for waiter in waiters:
            if waiter.session.id in self._sessions:
                self._again(waiter.session, waiter.request)

    def _tell(self, waiter: _Waiter, error: KvdError) -> None:
        if waiter.session.id in self._sessions:
            self._fail(waiter.session, waiter.request, error)

    def _look_at(self, rest: _Rest) -> None:
        """Of a card that is there and that nobody waits for."""
        device, now_s = rest.home.device, self._clock()
        if self._is_used(device) or self._may_be_mapped(device):
            rest.idle_since_s = rest.leaves_until_s = None
            return
        if rest.idle_since_s is None:
            rest.idle_since_s = now_s
        if rest.leaves_until_s is None:
            if now_s < rest.idle_since_s + self._idle_s:
                return
            rest.leaves_until_s = now_s + self._bound_s
            for pool in self._pools.of_device(device):
                if self._spilling is not None:
                    self._spilling.spill_all(pool)
        self._leave(rest, now_s)

    def _leave(self, rest: _Rest, now_s: float) -> None:
        """Empties the pools once nothing is copied to or from them any more, and begins to close the card."""
        pools = self._pools.of_device(rest.home.device)
        num_uncopied = sum(pool.num_uncopied for pool in pools)
        copies = self._spilling is not None and self._spilling.may_copy and num_uncopied
        if copies and now_s < (rest.leaves_until_s or 0.0):
            return
        if any(pool.is_held for pool in pools):
            # A copy ends, and then this is looked at again; a pin does not.
            if not any(pool.num_in_transit for pool in pools):
                rest.idle_since_s, rest.leaves_until_s = now_s, None
            elif rest.leaves_until_s is not None and now_s >= rest.leaves_until_s:
                rest.leaves_until_s = now_s + self._bound_s
            return
        self._pools.retire_all(rest.home.device)
        self._settle()
        rest.idle_since_s = rest.leaves_until_s = None
        lost = f", {num_uncopied} blocks without a copy below are lost" if num_uncopied else ""
        _log.info("nobody has used %s for %g s: it is released%s", rest.home.device, self._idle_s, lost)
        rest.card.stock.release()

    def _is_used(self, device: str) -> bool:
        return any(
            cache.pool.device == device or (cache.pool.source is not None and cache.pool.source.device == device)
            for session in self._sessions.values()
            for cache in session.caches.values()
        )
