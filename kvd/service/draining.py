"""Device segments that left their pools while clients may map them: freed only when nobody does any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvd.block import SegmentId, SessionId
from kvd.memory import DeviceSegment
from kvd.service.homes import Home

Place = tuple[int, SegmentId]
"""(pool id, segment)."""


@dataclass(slots=True)
class _Drain:
    home: Home
    segment: DeviceSegment
    sessions: set[SessionId]
    """Those it was granted to, which have neither confirmed its close nor ended."""


class Draining:
    """Freeing memory that another process maps is undefined, and no driver can say who maps it; so clients are asked.

    Loop thread only. Invariant: a session is in `_by_session` exactly with the segments that wait for it.
    """

    def __init__(self) -> None:
        self._open: dict[Place, _Drain] = {}
        self._by_session: dict[SessionId, set[Place]] = {}
        self._num_open: Counter[str] = Counter()
        """By device."""

    def num_segments(self, device: str) -> int:
        """Segments of the device whose memory is not back yet."""
        return self._num_open[device]

    def begin(self, place: Place, home: Home, segment: DeviceSegment, sessions: Iterable[SessionId]) -> None:
        """The segment left its pool, and these sessions were told so."""
        drain = _Drain(home, segment, set(sessions))
        for session in drain.sessions:
            self._by_session.setdefault(session, set()).add(place)
        self._open[place] = drain
        self._num_open[home.device] += 1
        self._end_if_closed(place, drain)

    def closed(self, session: SessionId, place: Place) -> Home | None:
        """The session maps it no more. Where its memory went back, if this was the last one.

        Raises `KeyError` when nobody asked the session to close it.
        """
        self._by_session[session].remove(place)
        if not self._by_session[session]:
            del self._by_session[session]
        drain = self._open[place]
        drain.sessions.remove(session)
        return drain.home if self._end_if_closed(place, drain) else None

    def session_ended(self, session: SessionId) -> list[Home]:
        """Its process holds nothing any more. Where memory went back by that."""
        freed = [self.closed(session, place) for place in list(self._by_session.get(session, ()))]
        return [home for home in freed if home is not None]

    def waits_for(self, session: SessionId) -> frozenset[Place]:
        """Segments that the session was told to close and has not."""
        return frozenset(self._by_session.get(session, ()))

    def close(self) -> None:
        """For the end of the daemon: the memory goes with the process, and until then stays for those who map it."""
        for drain in self._open.values():
            drain.segment.let_go()
        self._open.clear()
        self._by_session.clear()
        self._num_open.clear()

    def _end_if_closed(self, place: Place, drain: _Drain) -> bool:
        if drain.sessions:
            return False
        del self._open[place]
        self._num_open[drain.home.device] -= 1
        drain.home.stock.discard(drain.segment)
        return True
