"""Memory for pools to grow into: who waits for it, in which order, and when a stock that failed is tried again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kvd.pool import Pool, Pools
from kvd.service.attempts import Attempt
from kvd.service.homes import Home, Homes
from kvd.service.parking import MemoryPlace, ParkingLot
from kvd.service.promotion import Grown
from kvd.service.segments import SegmentTable, wants_huge_pages
from kvd.service.settings import ServiceSettings


class Growth:
    """First come, first served for each device, promotions after everybody who waits for memory to go on at all.

    Loop thread only; segments are made by the stocks' own threads.
    """

    def __init__(
        self,
        *,
        lot: ParkingLot[Attempt],
        pools: Pools,
        homes: Homes,
        table: SegmentTable,
        settings: ServiceSettings,
        clock: Callable[[], float],
    ) -> None:
        self._lot = lot
        self._pools = pools
        self._homes = homes
        self._table = table
        self._settings = settings
        self._clock = clock

    @property
    def next_retry_s(self) -> float | None:
        """When `retry` has something to do."""
        return min((home.retry_at_s for home in self._homes if home.retry_at_s is not None), default=None)

    def retry(self, now_s: float) -> bool:
        """Asks stocks that failed anew, where it is time to; whether any was."""
        any_tried = False
        for home in self._homes:
            if home.retry_at_s is not None and home.retry_at_s <= now_s:
                home.retry_at_s = None
                if home.lost is None:
                    home.stock.retry()
                    self._pools.memory_retry(home.device)
                    any_tried = True
        return any_tried

    def for_promotion(self, pool: Pool) -> Grown:
        """One segment more for a promotion."""
        home = self._homes.of(pool)
        if home.is_away:
            return "refused"
        if not self._lot.at(memory_of(home)) and self._table.grow(pool, 1):
            return "grown"
        if home.stock.failed is not None:
            self.failed(pool, home, home.stock.failed)
            return "refused"
        home.stock.request(1, huge_pages=wants_huge_pages(pool))
        return "later"

    def at_once(self, attempt: Attempt, home: Home, num_segments: int) -> bool:
        """Grows the pool of `attempt` by what is ready. Whoever came first is served first, though one were ready."""
        queue = self._lot.at(memory_of(home))
        if queue and queue[0] is not attempt:
            return False
        return self._table.grow(attempt.cache.pool, num_segments) > 0

    def refusal(self, attempt: Attempt, home: Home) -> str | None:
        """Why it is no use to wait for memory, None while it is."""
        if home.stock.failed is not None:
            return home.stock.failed
        if attempt.memory_until_s is not None and self._clock() >= attempt.memory_until_s:
            return f"no memory for a segment came within {self._settings.growth_wait_s:g} s"
        return None

    def failed(self, pool: Pool, home: Home, reason: str) -> None:
        """The pool gets no more for now: told so, it evicts or raises. The stock is tried again after a while."""
        self._pools.growth_failed(pool.pool_id, reason)
        self._schedule_retry(home)

    def wait(self, attempt: Attempt, home: Home, num_segments: int) -> None:
        """Parks it until its segments are made, or cannot be."""
        if attempt.memory_until_s is None:
            attempt.memory_until_s = self._clock() + self._settings.growth_wait_s
        attempt.num_segments = num_segments
        self._lot.park(attempt, memory_of(home), attempt.memory_until_s)
        self._request(home)

    def hand_out(self, home: Home, advance: Callable[[Attempt, MemoryPlace], None]) -> None:
        """The stock has made something, or failed: grows the pools of those who wait, and has each tried again."""
        if home.stock.failed is not None:
            self._schedule_retry(home)
        place = memory_of(home)
        for attempt in self._lot.at(place):
            room = self._pools.num_segments_room(home.device)
            if room > 0 and attempt.place == place and home.lost is None:
                num_wanted = min(attempt.num_segments, room)
                attempt.num_segments -= self._table.grow(attempt.cache.pool, num_wanted)
                if attempt.num_segments > 0 and home.stock.failed is None:
                    break
            advance(attempt, place)

    def request_anew(self, devices: Collection[str]) -> None:
        """Somebody waits for memory no longer: the stocks need not make what nobody would take."""
        for home in self._homes:
            if home.device in devices:
                home.stock.withdraw()
                self._request(home)

    def _request(self, home: Home) -> None:
        wanted = {False: 0, True: 0}
        for other in self._lot.at(memory_of(home)):
            wanted[wants_huge_pages(other.cache.pool)] += other.num_segments
        for huge_pages, num_wanted in wanted.items():
            if num_wanted:
                home.stock.request(num_wanted, huge_pages=huge_pages)

    def _schedule_retry(self, home: Home) -> None:
        if home.retry_at_s is None:
            home.retry_at_s = self._clock() + self._settings.memory_retry_s


def memory_of(home: Home) -> MemoryPlace:
    """Where those wait who need segments of that device."""
    return "memory", home.device


def devices_waited_for(attempts: Iterable[Attempt]) -> set[str]:
    """The devices whose memory some of these wait for."""
    places = [attempt.place for attempt in attempts]
    return {place[1] for place in places if place is not None and place[0] == "memory"}
