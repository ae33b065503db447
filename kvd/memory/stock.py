"""Host segments made ahead, on a thread of their own, so that the loop never waits for the kernel to find memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from kvd.errors import KvdError, OutOfMemory
from kvd.memory.available import available_memory_nbytes, free_huge_pages_nbytes, reserve_nbytes
from kvd.memory.making import Prefault, Stock, Stopping
from kvd.memory.segment import HostSegment

HugePages = Literal["auto", "off"]
_log = logging.getLogger(__name__)


class SegmentStock(Stock[HostSegment]):
    """Makes host segments, those of kind True of huge pages that the machine has set aside. See `Stock`.

    The machine keeps `reserve` bytes: where they would be touched, `failed` tells why and nothing is made until
    `retry()`.
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
        prepare: Callable[[HostSegment], None] = lambda _segment: None,
    ) -> None:
        """`reserve` defaults to 5 % of what is available now, at least 512 MiB.

        `prepare` is called with each new segment on the stock's thread, and may take its time.
        """
        super().__init__(
            segment_nbytes=segment_nbytes,
            budget_nbytes=budget_nbytes,
            prefault=prefault,
            on_ready=on_ready,
            thread_name="kvd-segment-stock",
            what="memory",
        )
        self.reserve = reserve_nbytes(available()) if reserve is None else reserve
        self._huge_pages = huge_pages == "auto"
        self._available = available
        self._free_huge_pages = free_huge_pages
        self._prepare = prepare
        self._huge_pages_short = False  # they were wanted and not there: plain ones instead, until `retry()`

    def start(self) -> None:
        """Starts the thread; with "background" prefault the first segment is made before this returns.

        Raises `OutOfMemory` when not even the first segment can be had, so that a daemon without memory fails at once.
        """
        if self._prefault == "background" and self._max_segments:
            self._ready[False].append(self._make(huge_pages=False))
        elif self._max_segments:
            self._check_room(self.segment_nbytes)
        self._thread.start()

    def retry(self) -> None:
        """Huge pages are tried again, too."""
        with self._changed:
            self._huge_pages_short = False
        super().retry()

    def available_nbytes(self) -> int:
        """What the machine, or the cgroup, could still give, the reserve left out. Reads a few small kernel files."""
        return max(0, self._available() - self.reserve)

    # Everything below is the stock's own thread, or called with the lock held where it says so.

    def _kind_to_take(self, huge_pages: bool) -> bool | None:
        if not huge_pages or not self._huge_pages or self._ready[True]:
            return huge_pages and self._huge_pages
        return None if self._may_make_huge() else False

    def _kind_to_make(self, huge_pages: bool) -> bool:
        return huge_pages and self._huge_pages

    def _may_make_huge(self) -> bool:
        """With the lock held: whether a request for huge pages is worth waiting for."""
        return not self._huge_pages_short and self._failed is None

    def _next_kind(self) -> bool | None:
        if self._failed is None and self._wanted[True] > len(self._ready[True]):
            if self._num_held() >= self._max_segments and self._ready[False]:
                # The budget is full of plain segments made ahead: one of them makes room.
                self._discarded.append(self._ready[False].pop())
            if self._num_held() < self._max_segments:
                return True
        return super()._next_kind()

    def _make_one(self, kind: bool) -> None:
        try:
            if kind and self._free_huge_pages() < self.segment_nbytes:
                self._settle_for_plain_pages()
                return
            segment = self._make(huge_pages=kind)
        except (KvdError, OSError, MemoryError) as error:
            if kind:
                self._settle_for_plain_pages()
            else:
                self._fail(str(error))
        else:
            self._made(kind, segment)

    def _settle_for_plain_pages(self) -> None:
        """Too few huge pages is never a failure: plain pages serve as well."""
        with self._changed:
            self._num_making, self._huge_pages_short = 0, True
            self._wanted[False] += self._wanted[True]
            self._wanted[True] = 0
        _log.info("too few free huge pages of 2 MiB for a segment; using plain pages (see vm.nr_hugepages)")

    def _make(self, *, huge_pages: bool) -> HostSegment:
        segment = HostSegment(
            self.segment_nbytes,
            huge_pages=huge_pages,
            collapse=self._huge_pages,
            before_step=self._before_huge_step if huge_pages else self._before_step,
        )
        try:
            self._prepare(segment)
        except BaseException:
            segment.close()
            raise
        return segment

    def _before_huge_step(self, _remaining_nbytes: int) -> None:
        if self._stopping:
            raise Stopping
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
