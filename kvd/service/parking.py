"""Requests that wait: where each one waits, in which order, and until when. A parked request holds nothing."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Generic, Literal, TypeVar, cast

from kvd.block import ChainHash
from kvd.service.sessions import Session

HashPlace = tuple[int, ChainHash]
"""(pool id, hash): waits for a computation that another session announced."""
MemoryPlace = tuple[Literal["memory"], str]
"""("memory", device): waits for segments that are being made."""
BlocksPlace = tuple[Literal["blocks"], int]
"""("blocks", pool id): waits for somebody to give blocks back."""
BelowPlace = tuple[Literal["below"], int]
"""("below", number): waits for what a tier below answers or brings up."""
Place = HashPlace | MemoryPlace | BlocksPlace | BelowPlace


class Parked:
    """What the parking lot keeps with a request; requests that may wait derive from it."""

    __slots__ = ("place", "session", "until_s")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.place: Place | None = None
        self.until_s = math.inf


RequestT = TypeVar("RequestT", bound=Parked)


class ParkingLot(Generic[RequestT]):
    """First in, first out at each place; every stay has an end.

    Invariant: a request is at `place` and in its session's `parked` exactly while `place` is not None. Each step is
    O(1), or O(log n) in the number of parked requests for the deadline.
    """

    def __init__(self) -> None:
        self._places: dict[Place, dict[RequestT, None]] = {}
        self._deadlines: list[tuple[float, int, RequestT]] = []
        self._num_parked = 0
        self._ticket = itertools.count()

    def park(self, request: RequestT, place: Place, until_s: float) -> None:
        """Parks it, or moves it to another place; one that is at this place already keeps its turn."""
        if request.place != place:
            self.leave(request)
            self._places.setdefault(place, {})[request] = None
            request.place = place
            request.session.parked.add(request)
            self._num_parked += 1
        if request.until_s != until_s:
            # With the same end as before, the entry it has serves on.
            request.until_s = until_s
            heapq.heappush(self._deadlines, (until_s, next(self._ticket), request))
            self._drop_stale_deadlines()

    def leave(self, request: RequestT) -> None:
        """It waits no longer; nothing happens when it did not."""
        place = request.place
        if place is None:
            return
        queue = self._places[place]
        del queue[request]
        if not queue:
            del self._places[place]
        request.place = None
        request.session.parked.discard(request)
        self._num_parked -= 1

    def forget(self, session: Session) -> None:
        """Everything of an ended session leaves."""
        for request in list(session.parked):
            self.leave(cast("RequestT", request))

    def at(self, place: Place) -> list[RequestT]:
        """Those who wait there, first come first."""
        return list(self._places.get(place, ()))

    def places(self) -> dict[Place, list[RequestT]]:
        """Everybody who waits, by place; first come first at each."""
        return {place: list(queue) for place, queue in self._places.items()}

    def pools_short_of_blocks(self) -> list[BlocksPlace]:
        """The places where somebody waits for blocks."""
        return [place for place in self._places if place[0] == "blocks"]

    def expired(self, now_s: float) -> list[RequestT]:
        """Those whose time is over by now, earliest first. They stay parked until they are moved or leave."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)
            if _is_live(entry):
                found.append(entry[2])
                entry[2].until_s = math.inf  # whoever parks it again needs a new entry, even with the same end
        return found

    @property
    def next_deadline_s(self) -> float | None:
        """When the next stay ends."""
        while self._deadlines:
            if _is_live(self._deadlines[0]):
                return self._deadlines[0][0]
            heapq.heappop(self._deadlines)
        return None

    def __len__(self) -> int:
        return self._num_parked

    def _drop_stale_deadlines(self) -> None:
        # Most waits end long before their bound; without this their entries would pile up until then.
        if len(self._deadlines) > 64 + 4 * self._num_parked:
            self._deadlines = list(filter(_is_live, self._deadlines))
            heapq.heapify(self._deadlines)


def _is_live(entry: tuple[float, int, Parked]) -> bool:
    until_s, _, request = entry
    return request.place is not None and request.until_s == until_s
