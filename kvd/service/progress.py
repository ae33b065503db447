"""Carries requests to their end: who waits for what, who goes next, and when waiting is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from kvd.block import ChainHash, SessionId
from kvd.errors import KvdError, OutOfBlocks, OutOfMemory, QuotaExceeded, WouldWait
from kvd.pool import AskBelow, Grow, Pool, Pools, WaitFor
from kvd.protocol.replies import Reply
from kvd.service.attempts import Attempt, BeginAttempt
from kvd.service.beside import computed_beside
from kvd.service.growth import Growth, devices_waited_for
from kvd.service.homes import Homes
from kvd.service.parking import ParkingLot, Place
from kvd.service.promotion import Promotions
from kvd.service.segments import SegmentTable
from kvd.service.sessions import Session
from kvd.service.settings import ServiceSettings
from kvd.status import WaitStatus


class Progress:
    """Tries attempts, parks those that must wait, and tries them again when what they wait for has come or time is up.

    No cycle can form: a parked attempt holds nothing, a session with announcements of its own waits for another's only
    when it says so, and every stay has an end. Loop thread only.
    """

    def __init__(
        self,
        *,
        pools: Pools,
        homes: Homes,
        table: SegmentTable,
        sessions: Mapping[SessionId, Session],
        settings: ServiceSettings,
        clock: Callable[[], float],
        reply: Callable[[Session, Reply], None],
        fail: Callable[[Attempt, KvdError], None],
    ) -> None:
        self.lot: ParkingLot[Attempt] = ParkingLot()
        self.blocks_came_back = False
        """Set by whoever gives blocks or memory back; `settle` then tries those who wait for blocks."""
        self.growth = Growth(lot=self.lot, pools=pools, homes=homes, table=table, settings=settings, clock=clock)
        self._pools = pools
        self._homes = homes
        self._table = table
        self._sessions = sessions
        self._settings = settings
        self._clock = clock
        self._reply = reply
        self._fail = fail
        self.promotions: Promotions | None = None
        """None while there is no tier below."""
        self.on_memory: Callable[[], None] = lambda: None
        """Has the copies from and to below, which come after whoever waits here, ask for their memory again."""
        self.on_served: Callable[[Attempt], None] | None = None
        """Told of every attempt that got its reply, after that was queued."""

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        deadlines = [self.lot.next_deadline_s, self.growth.next_retry_s]
        return min((one for one in deadlines if one is not None), default=None)

    def advance(self, attempt: Attempt) -> None:
        """Tries until the attempt has its reply, its error, or a place to wait at."""
        try:
            reply = self._try(attempt)
        except KvdError as error:
            if self._waits_for_blocks(attempt, error):
                return
            self._end(attempt)
            self._fail(attempt, error)
        else:
            if reply is not None:
                self._end(attempt)
                self._reply(attempt.session, reply)
                if self.on_served is not None:
                    self.on_served(attempt)

    def waits(self) -> list[WaitStatus]:
        """What the parked requests wait for."""
        now_s = self._clock()
        return [self._wait_status(place, queue, now_s) for place, queue in self.lot.places().items()]

    def _wait_status(self, place: Place, queue: list[Attempt], now_s: float) -> WaitStatus:
        what, pool_id, chain_hash, writer = "memory", -1, b"", 0
        if place[0] == "below":
            what = "answer"
        elif place[0] == "blocks":
            what, pool_id = "blocks", place[1]
        elif place[0] != "memory":
            what, pool_id, chain_hash = "promotion", place[0], place[1]
            lease = self._pools.get(pool_id).announcements.by_hash.get(ChainHash(chain_hash))
            if lease is not None:
                what, writer = "computation", lease.session_id
        return WaitStatus(
            what=what,
            pool=pool_id,
            hash=chain_hash.hex(),
            waiting=[attempt.session.id for attempt in queue],
            writer=writer,
            left_s=max(0.0, max(attempt.until_s for attempt in queue) - now_s),
        )

    def forget(self, session: Session) -> None:
        """Everything an ended session waits for: nobody wants it any more."""
        attempts = cast("list[Attempt]", list(session.parked))
        waited_for_memory = devices_waited_for(attempts)
        self.lot.forget(session)
        for attempt in attempts:
            self._leave_promotion(attempt)
        if waited_for_memory:
            self.growth.request_anew(waited_for_memory)
            self.on_memory()

    def wait_below(self, attempt: Attempt, number: int) -> None:
        """Parks it until what has that number was answered, or hangs for too long."""
        self.lot.park(attempt, ("below", number), self._patience_s(attempt))

    def answered_below(self, number: int) -> None:
        """What those parked at ("below", number) wait for has come, or will not."""
        place: Place = ("below", number)
        for attempt in self.lot.at(place):
            self._advance_parked(attempt, place)

    def settle(self) -> None:
        """After every change: memory that left its pool goes, and those whose turn has come are tried.

        Those who wait for one hash are tried in their order; the first of them may announce it anew, and the others
        then keep their places behind it.
        """
        while True:
            for dropped in self._pools.take_dropped():
                self._table.drop(dropped, self._sessions.values())
            woken = self._pools.take_woken()
            if not self.lot:
                self.blocks_came_back = False
                return
            for place in woken:
                for attempt in self.lot.at(place):
                    self._advance_parked(attempt, place)
            if not woken and not self.blocks_came_back:
                return
            if self.blocks_came_back:
                self.blocks_came_back = False
                self._serve_those_short_of_blocks()

    def memory_ready(self) -> None:
        """A stock has made something, or failed: first come, first served."""
        self.blocks_came_back = True
        for home in self._homes:
            self.growth.hand_out(home, self._advance_parked)
        self.on_memory()

    def fail_lost(self) -> None:
        """Everybody who waits for something on a card that is lost is told so now, or goes on without it."""
        for home in self._homes:
            if home.lost is not None:
                for attempt in [one for queue in self.lot.places().values() for one in queue]:
                    pool = attempt.cache.pool
                    if home.device in {pool.device, pool.source and pool.source.device} and attempt.place is not None:
                        self.advance(attempt)

    def tick(self, now_s: float) -> None:
        """Ends the stays that are over by `now_s`, and tries for memory again when it is time."""
        if self.growth.retry(now_s):
            self.blocks_came_back = True
        expired = self.lot.expired(now_s)
        waited_for_memory = devices_waited_for(expired)
        for attempt in expired:
            if attempt.place is None or attempt.place[0] != "memory":
                if self._waits_on_below(attempt, now_s):
                    continue
                attempt.stop_waiting_for_others()
                attempt.waits_for_blocks_until_s = None
            if attempt.place is not None:
                self.advance(attempt)
        if waited_for_memory:
            self.growth.request_anew(waited_for_memory)
        self.on_memory()  # whoever stood before in the queue for memory may be gone

    def _try(self, attempt: Attempt) -> Reply | None:
        """A reply, or None when it is parked. Raises the error that ends it."""
        home = self._homes.of(attempt.cache.pool)
        refused = False
        while True:
            home.check()
            outcome = attempt.run(self._table)
            if isinstance(outcome, WaitFor):
                if self._waits_for_hash(cast("BeginAttempt", attempt), attempt.cache.pool, outcome):
                    return None
            elif isinstance(outcome, AskBelow):
                begin, num_resident = cast("BeginAttempt", attempt), outcome.num_resident
                if self._waits_beside(begin, num_resident) or self._waits_for_answer(begin, num_resident):
                    return None
            elif isinstance(outcome, Grow):
                if self.growth.at_once(attempt, home, outcome.num_segments):
                    continue
                reason = self.growth.refusal(attempt, home)
                if reason is None:
                    self.growth.wait(attempt, home, outcome.num_segments)
                    return None
                if refused:
                    raise OutOfMemory(reason)
                # Told once, the pool evicts or raises; to be asked again for memory would be the end of it.
                refused = True
                self.growth.failed(attempt.cache.pool, home, reason)
            else:
                return outcome

    def _waits_beside(self, attempt: BeginAttempt, num_resident: int) -> bool:
        """Parks it where another session computes what it misses, in a pool beside its own; then it asks anew."""
        found = computed_beside(self._pools, attempt, num_resident) if attempt.may_wait else None
        if found is None or self._homes.of(found[0]).lost is not None:
            return False
        return self._waits_for_hash(attempt, found[0], WaitFor(found[1]))

    def _waits_for_hash(self, attempt: BeginAttempt, pool: Pool, outcome: WaitFor) -> bool:
        """Parks it until the hash is in the pool or given up; False when its time is over and it no longer waits."""
        if outcome.is_filling:
            return self._waits_for_promotion(attempt, outcome.hash)
        if attempt.request.wait_s is None and self._pools.has_announcements(attempt.session.id):
            raise WouldWait(
                "another session computes a block of this prompt, while this session has announced blocks of its own; "
                "seal or release those first, or pass wait_s if they progress independently"
            )
        if self._clock() >= attempt.wait_until_s:
            attempt.stop_waiting_for_others()
            return False
        self._leave_promotion(attempt)  # who waits for another session holds nothing
        attempt.waited = True
        self.lot.park(attempt, (pool.pool_id, outcome.hash), attempt.wait_until_s)
        return True

    def _waits_for_promotion(self, attempt: BeginAttempt, wanted: ChainHash) -> bool:
        """Parks it for a block on its way up. No session can make it wait longer, so this is no part of any cycle."""
        until_s = self._answer_until_s(attempt)
        if self._clock() >= until_s or self.promotions is None:
            attempt.stop_waiting_for_others()
            return False
        self.promotions.hurry(attempt.cache.pool, wanted)
        attempt.waited = True
        self.lot.park(attempt, (attempt.cache.pool.pool_id, wanted), until_s)
        return True

    def _waits_for_answer(self, attempt: BeginAttempt, num_resident: int) -> bool:
        """Asks below, and parks it for the answer; False when it does not wait, or asking is no use."""
        attempt.ask_below = False
        if self.promotions is None:
            return False
        promotion = self.promotions.start(attempt.cache, attempt.wanted, num_resident, waited_for=attempt.may_wait)
        if promotion is None or not attempt.may_wait:
            return False
        attempt.promotion = promotion
        attempt.waited = True
        if promotion.woken:
            return False  # no answer need come: what there is, is on its way from the card already
        self.lot.park(attempt, ("below", promotion.number), self._answer_until_s(attempt))
        return True

    def _answer_until_s(self, attempt: BeginAttempt) -> float:
        """Until when it waits for a sign from below: a tier that hangs must not cost what computing would not."""
        if attempt.request.wait_s is not None:
            return attempt.wait_until_s
        return min(attempt.wait_until_s, self._patience_s(attempt))

    def _patience_s(self, attempt: Attempt) -> float:
        now_s, tiers = self._clock(), self._settings.tiers
        if attempt.below_until_s is None:
            attempt.below_until_s = now_s + tiers.first_answer_s
        return now_s + tiers.answer_s

    def _waits_on_below(self, attempt: Attempt, now_s: float) -> bool:
        """Parks it again where it waits for a sign from below, if so far the tiers had not even been asked for one."""
        place = attempt.place
        if self.promotions is None or attempt.below_until_s is None or place is None or place[0] == "memory":
            return False
        kind, name = place
        is_copying = isinstance(kind, int) and self._pools.all[kind].is_filling(cast("ChainHash", name))
        if kind != "below" and not is_copying:
            return False
        if isinstance(attempt, BeginAttempt) and attempt.request.wait_s is not None:
            return False
        since_s = self.promotions.owed_since_s(copies=is_copying)
        until_s = (now_s if since_s is None else since_s) + self._settings.tiers.answer_s
        until_s = min(until_s, attempt.below_until_s)
        if isinstance(attempt, BeginAttempt):
            until_s = min(until_s, attempt.wait_until_s)
        if until_s <= now_s:
            return False
        self.lot.park(attempt, place, until_s)
        return True

    def _end(self, attempt: Attempt) -> None:
        self.lot.leave(attempt)
        self._leave_promotion(attempt)

    def _leave_promotion(self, attempt: Attempt) -> None:
        promotion, attempt.promotion = attempt.promotion, None
        if promotion is not None and self.promotions is not None:
            self.promotions.leave(promotion)

    def _waits_for_blocks(self, attempt: Attempt, error: KvdError) -> bool:
        """Parks it until blocks come back, if it prefers that to the error. A quota is nobody else's to give back."""
        if not isinstance(error, OutOfBlocks) or isinstance(error, QuotaExceeded):
            return False
        now_s, until_s = self._clock(), attempt.waits_for_blocks_until_s
        if until_s is None or now_s >= until_s:
            # It prefers the error; but what a copy holds would have been evicted for it, and comes back in a moment,
            # and so does memory that clients were told to close, or that a killed one was writing.
            pool = attempt.cache.pool
            comes_back = self._table.is_draining(pool.device) or self._pools.is_held_by_lingering(pool)
            if attempt.transit_until_s is None and comes_back:
                attempt.transit_until_s = now_s + self._settings.drain_wait_s
            elif attempt.transit_until_s is None and attempt.cache.pool.num_in_transit:
                attempt.transit_until_s = now_s + self._settings.tiers.answer_s
            until_s = attempt.transit_until_s
        if until_s is None or now_s >= until_s:
            return False
        self._leave_promotion(attempt)
        self.lot.park(attempt, ("blocks", attempt.cache.pool.pool_id), until_s)
        return True

    def _serve_those_short_of_blocks(self) -> None:
        for place in self.lot.pools_short_of_blocks():
            for attempt in self.lot.at(place):
                self._advance_parked(attempt, place)
                if attempt.place == place:
                    break

    def _advance_parked(self, attempt: Attempt, place: Place) -> None:
        # An earlier one's turn may have moved or ended this one.
        if attempt.place == place:
            self.advance(attempt)
