"""Segments made ahead, on a thread of their own, so that the loop never waits for the kernel to find memory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from kvd.errors import KvdError, OutOfMemory
from kvd.memory.available import available_memory_nbytes, free_huge_pages_nbytes, reserve_nbytes
from kvd.memory.segment import HostSegment

Prefault = Literal["background", "lazy"]
HugePages = Literal["auto", "off"]
_log = logging.getLogger(__name__)


class _Stopping(Exception):
    """Raised between two allocation steps when the stock closes."""


class SegmentStock:
    """Makes host segments up to a byte budget; the loop takes them and puts them back only to be destroyed.

    "background" fills the whole budget ahead of need, "lazy" makes what `request` asks for. Either way the machine
    keeps `reserve` bytes: where they would be touched, `failed` tells why and nothing is made until `retry()`.

    Invariant, whenever the lock is free: taken + ready + being made <= budget (in segments), except after a budget was
    lowered below what is taken. A segment that was taken once is never handed out again: memory never changes tenant.

    `take`, `request`, `withdraw`, `discard`, `retry`, `set_budget` and the figures are quick and may be called from any
    one thread beside the stock's own; the lock is never held over an allocation, a close or `on_ready`.
    """

    def __init__(
        self,
        *,
        segment_nbytes: int,
        budget_nbytes: int,
        prefault: Prefault = "background",
        huge_pages: HugePages = "auto",
        reserve: int | None = None,
        on_ready: Callable[[], None] = lambda: None,
        available: Callable[[], int] = available_memory_nbytes,
        free_huge_pages: Callable[[], int] = free_huge_pages_nbytes,
    ) -> None:
        """`reserve` defaults to 5 % of what is available now, at least 512 MiB.

        `on_ready` is called on the stock's thread after each segment made and each failure, without the lock; it must
        neither block nor raise.
        """
        self.segment_nbytes = segment_nbytes
        self.reserve = reserve_nbytes(available()) if reserve is None else reserve
        self._prefault = prefault
        self._huge_pages = huge_pages == "auto"
        self._on_ready = on_ready
        self._available = available
        self._free_huge_pages = free_huge_pages
        self._changed = threading.Condition()
        self._max_segments = budget_nbytes // segment_nbytes
        self._ready: dict[bool, deque[HostSegment]] = {False: deque(), True: deque()}
        self._wanted = {False: 0, True: 0}
        self._discarded: deque[HostSegment] = deque()
        self._num_taken = 0
        self._num_making = 0
        self._failed: str | None = None
        self._huge_pages_short = False  # they were wanted and not there: plain ones instead, until `retry()`
        self._told = False  # the log has the failure already; retries that fail again are not worth a line each
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvd-segment-stock", daemon=True)

    def start(self) -> None:
        """Starts the thread; with "background" prefault the first segment is made before this returns.

        Raises `OutOfMemory` when not even the first segment can be had, so that a daemon without memory fails at once.
        """
        if self._prefault == "background" and self._max_segments:
            self._ready[False].append(self._make(huge_pages=False))
        elif self._max_segments:
            self._check_room(self.segment_nbytes)
        self._thread.start()

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

    def take(self, *, huge_pages: bool = False) -> HostSegment | None:
        """A segment that is ready, for the caller to own, or None: then `request` it and wait for `on_ready`.

        `huge_pages` says that the blocks are whole huge pages; the segment then has them if the machine has them free.
        """
        huge_pages = huge_pages and self._huge_pages
        with self._changed:
            if huge_pages and not self._ready[True]:
                if self._may_make_huge():
                    return None
                huge_pages = False
            shelf = self._ready[huge_pages]
            if not shelf:
                return None
            segment = shelf.popleft()
            self._num_taken += 1
            self._wanted[huge_pages] = max(0, self._wanted[huge_pages] - 1)
            self._changed.notify()
            return segment

    def request(self, num_segments: int, *, huge_pages: bool = False) -> None:
        """Asks that `num_segments` be ready to be taken, as far as the budget allows. Asking twice is asking once."""
        kind = huge_pages and self._huge_pages
        with self._changed:
            self._wanted[kind] = max(self._wanted[kind], num_segments)
            self._changed.notify()

    def withdraw(self) -> None:
        """Whoever asked waits no longer: nothing is made for the requests of before."""
        with self._changed:
            self._wanted = {False: 0, True: 0}

    def discard(self, segment: HostSegment) -> None:
        """Takes back a taken segment that nobody maps any more; the stock's thread destroys it."""
        with self._changed:
            self._num_taken -= 1
            self._discarded.append(segment)
            self._changed.notify()

    def retry(self) -> None:
        """Forgets a failure: what is requested from now on, or was since it, is tried again."""
        with self._changed:
            self._failed = None
            self._huge_pages_short = False
            self._changed.notify()

    def set_budget(self, budget_nbytes: int) -> None:
        """From now on at most this much; ready segments above it are destroyed, taken ones are the pools' affair.

        Those of huge pages, which are made only when somebody asks, go last.
        """
        with self._changed:
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

    def available_nbytes(self) -> int:
        """What the machine, or the cgroup, could still give, the reserve left out. Reads a few small kernel files."""
        return max(0, self._available() - self.reserve)

    # Everything below is the stock's own thread, or called with the lock held where it says so.

    def _num_held(self) -> int:
        return self._num_taken + self._num_making + sum(map(len, self._ready.values()))

    def _may_make_huge(self) -> bool:
        """With the lock held: whether a request for huge pages is worth waiting for."""
        return not self._huge_pages_short and self._failed is None

    def _next_kind(self) -> bool | None:
        """With the lock held: what to make now (True: of huge pages), None for nothing."""
        if self._failed is not None:
            return None
        if self._wanted[True] > len(self._ready[True]):
            if self._num_held() >= self._max_segments and self._ready[False]:
                # The budget is full of plain segments made ahead: one of them makes room.
                self._discarded.append(self._ready[False].pop())
            if self._num_held() < self._max_segments:
                return True
        if self._num_held() < self._max_segments and (
            self._prefault == "background" or self._wanted[False] > len(self._ready[False])
        ):
            return False
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while (kind := self._next_kind()) is None and not self._discarded and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                self._num_making = int(kind is not None)
            self._destroy_discarded()
            if kind is None:
                continue
            try:
                self._make_one(kind)
            except _Stopping:
                return
            self._on_ready()

    def _make_one(self, kind: bool) -> None:
        try:
            if kind and self._free_huge_pages() < self.segment_nbytes:
                self._settle_for_plain_pages()
                return
            segment = self._make(huge_pages=kind)
        except (KvdError, OSError, MemoryError) as error:
            if kind:
                self._settle_for_plain_pages()
                return
            with self._changed:
                self._num_making, self._failed = 0, str(error)
                # Whoever waited is refused now, and asks again if it still wants any when there is memory again.
                self._wanted = {False: 0, True: 0}
                told, self._told = self._told, True
            if not told:
                _log.warning("no more memory for segments: %s", error)
        else:
            with self._changed:
                self._num_making, self._told = 0, False
                self._ready[kind].append(segment)

    def _settle_for_plain_pages(self) -> None:
        """Too few huge pages is never a failure: plain pages serve as well."""
        with self._changed:
            self._num_making, self._huge_pages_short = 0, True
            self._wanted[False] += self._wanted[True]
            self._wanted[True] = 0
        _log.info("too few free huge pages of 2 MiB for a segment; using plain pages (see vm.nr_hugepages)")

    def _make(self, *, huge_pages: bool) -> HostSegment:
        return HostSegment(
            self.segment_nbytes,
            huge_pages=huge_pages,
            collapse=self._huge_pages,
            before_step=self._before_huge_step if huge_pages else self._before_step,
        )

    def _before_huge_step(self, _remaining_nbytes: int) -> None:
        if self._stopping:
            raise _Stopping
        self._destroy_discarded()

    def _before_step(self, remaining_nbytes: int) -> None:
        self._before_huge_step(remaining_nbytes)
        self._check_room(remaining_nbytes)

    def _check_room(self, wanted_nbytes: int) -> None:
        available_nbytes = self._available()
        if available_nbytes - self.reserve < wanted_nbytes:
            raise OutOfMemory(
                f"{wanted_nbytes >> 20} MiB more for a segment would leave less than the reserve of "
                f"{self.reserve >> 20} MiB ({available_nbytes >> 20} MiB are available); free memory, or lower "
                f"memory.budget"
            )

    def _destroy_discarded(self) -> None:
        while True:
            with self._changed:
                if not self._discarded:
                    return
                segment = self._discarded.popleft()
            segment.close()
