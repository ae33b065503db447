"""What stocks of segments have in common: a thread that makes them ahead of need within a budget, and destroys them."""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

Prefault = Literal["background", "lazy"]
_log = logging.getLogger(__name__)


class Closable(Protocol):
    """A segment, as far as a stock cares."""

    def close(self) -> None: ...


SegmentT = TypeVar("SegmentT", bound=Closable)


class Stopping(Exception):
    """Raised while a segment is made when the stock closes."""


class Stock(abc.ABC, Generic[SegmentT]):
    """Makes segments up to a byte budget; the loop takes them and puts them back only to be destroyed.

    "background" fills the whole budget ahead of need, "lazy" makes what `request` asks for. When there is no more
    memory, what there is stays, `failed` tells why and nothing is made until `retry()`. Segments are of two kinds,
    False and True, where the subclass knows of a second one.

    Invariant, whenever the lock is free: taken + ready + being made <= budget (in segments), except after a budget was
    lowered below what is taken or being made; what is made then is destroyed. A segment that was taken once is never
    handed out again: memory never changes tenant.

    `take`, `request`, `withdraw`, `discard`, `retry`, `set_budget` and the figures are quick and may be called from any
    one thread beside the stock's own; the lock is never held over an allocation, a close or `on_ready`.
    """

    def __init__(
        self,
        *,
        segment_nbytes: int,
        budget_nbytes: int,
        prefault: Prefault,
        on_ready: Callable[[], None],
        thread_name: str,
        what: str,
    ) -> None:
        """`on_ready` is called on the stock's thread after each segment made and each failure, without the lock; it
        must neither block nor raise. `what` is what the log calls the memory.
        """
        self.segment_nbytes = segment_nbytes
        self._budget_nbytes = budget_nbytes
        self._prefault = prefault
        self._on_ready = on_ready
        self._what = what
        self._changed = threading.Condition()
        self._max_segments = budget_nbytes // segment_nbytes
        self._ready: dict[bool, deque[SegmentT]] = {False: deque(), True: deque()}
        self._wanted = {False: 0, True: 0}
        self._discarded: deque[SegmentT] = deque()
        self._num_taken = 0
        self._num_making = 0
        self._failed: str | None = None
        self._told = False  # the log has the failure already; retries that fail again are not worth a line each
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def close(self) -> None:
        """Stops the thread and destroys what is ready; waits at most for one allocation step. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for shelf in (*self._ready.values(), self._discarded):
            while shelf:
                shelf.popleft().close()

    def take(self, *, huge_pages: bool = False) -> SegmentT | None:
        """A segment that is ready, for the caller to own, or None: then `request` it and wait for `on_ready`.

        `huge_pages` says that the blocks are whole huge pages; the segment then has them if the machine has them free.
        """
        with self._changed:
            kind = self._kind_to_take(huge_pages)
            if kind is None or not self._ready[kind]:
                return None
            segment = self._ready[kind].popleft()
            self._num_taken += 1
            self._wanted[kind] = max(0, self._wanted[kind] - 1)
            self._changed.notify()
            return segment

    def request(self, num_segments: int, *, huge_pages: bool = False) -> None:
        """Asks that `num_segments` be ready to be taken, as far as the budget allows. Asking twice is asking once."""
        kind = self._kind_to_make(huge_pages)
        with self._changed:
            self._wanted[kind] = max(self._wanted[kind], num_segments)
            self._changed.notify()

    def withdraw(self) -> None:
        """Whoever asked waits no longer: nothing is made for the requests of before."""
        with self._changed:
            self._wanted = {False: 0, True: 0}

    def discard(self, segment: SegmentT) -> None:
        """Takes back a taken segment that nobody maps any more; the stock's thread destroys it."""
        with self._changed:
            self._num_taken -= 1
            self._discarded.append(segment)
            self._changed.notify()

    def retry(self) -> None:
        """Forgets a failure: what is requested from now on, or was since it, is tried again."""
        with self._changed:
            self._failed = None
            self._changed.notify()

    def set_budget(self, budget_nbytes: int) -> None:
        """From now on at most this much; ready segments above it are destroyed, taken ones are the pools' affair.

        Those of the second kind, which are made only when somebody asks, go last.
        """
        with self._changed:
            self._budget_nbytes = budget_nbytes
            self._max_segments = budget_nbytes // self.segment_nbytes
            for shelf in (self._ready[False], self._ready[True]):
                while shelf and self._num_held() > self._max_segments:
                    self._discarded.append(shelf.pop())
            self._changed.notify()

    @property
    def failed(self) -> str | None:
        """Why memory could not be had the last time, until `retry()` or None."""
        return self._failed

    @property
    def ready_nbytes(self) -> int:
        """Bytes of segments ready to be taken."""
        return sum(map(len, self._ready.values())) * self.segment_nbytes

    @property
    def taken_nbytes(self) -> int:
        """Bytes of segments that were taken and not yet discarded."""
        return self._num_taken * self.segment_nbytes

    @abc.abstractmethod
    def available_nbytes(self) -> int:
        """What could still be had, what is left to others not counted."""

    # Everything below is the stock's own thread, or called with the lock held where it says so.

    @abc.abstractmethod
    def _make_one(self, kind: bool) -> None:
        """Makes one segment and calls `_made`, or `_fail` when there is no memory. May raise `Stopping`."""

    def _kind_to_take(self, huge_pages: bool) -> bool | None:
        """With the lock held: which shelf serves this; None when waiting for a better one is worth it."""
        return False

    def _kind_to_make(self, huge_pages: bool) -> bool:
        return False

    def _next_kind(self) -> bool | None:
        """With the lock held: what to make now, None for nothing."""
        if self._failed is not None or self._num_held() >= self._max_segments:
            return None
        return False if self._prefault == "background" or self._wanted[False] > len(self._ready[False]) else None

    def _has_more_to_do(self) -> bool:
        """With the lock held: whether `_end_turn` has."""
        return False

    def _end_turn(self) -> None:
        """After each turn of the thread, without the lock."""

    def _num_held(self) -> int:
        return self._num_taken + self._num_making + sum(map(len, self._ready.values()))

    def _made(self, kind: bool, segment: SegmentT) -> None:
        with self._changed:
            self._num_making, self._told = 0, False
            # A budget that was lowered meanwhile has no room for it, and nobody would ever take it.
            has_room = self._num_held() < self._max_segments
            (self._ready[kind] if has_room else self._discarded).append(segment)

    def _fail(self, reason: str) -> None:
        with self._changed:
            # Whoever waited is refused now, and asks again if it still wants any when there is memory again.
            self._num_making, self._failed, self._wanted = 0, reason, {False: 0, True: 0}
            told, self._told = self._told, True
        if not told:
            _log.warning("no more %s for segments, going on with %d: %s", self._what, self._num_held(), reason)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (
                    self._stopping or self._discarded or self._has_more_to_do() or self._next_kind() is not None
                ):
                    self._changed.wait()
                if self._stopping:
                    return
                kind = self._next_kind()
                self._num_making = int(kind is not None)
            # Memory that comes back first: it may be what the next segment needs.
            self._destroy_discarded()
            if kind is not None:
                try:
                    self._make_one(kind)
                except Stopping:
                    return
                self._on_ready()
            self._end_turn()

    def _destroy_discarded(self) -> None:
        while True:
            with self._changed:
                if not self._discarded:
                    return
                segment = self._discarded.popleft()
            segment.close()
