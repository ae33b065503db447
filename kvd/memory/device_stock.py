"""Device segments made on a thread of their own, as many as the card, its other users and the budget allow."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvd.cuda import SEGMENT_GRANULE_NBYTES, Context
from kvd.errors import CudaError, CudaOutOfMemory, KvdError
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.making import Prefault, Stock

DEFAULT_RESERVE_NBYTES = 512 << 20
MIN_SEGMENT_NBYTES = 8 << 20
"""Below this the number of handles, each opened by every client, costs more than a shortage."""
_log = logging.getLogger(__name__)


class DeviceStock(Stock[DeviceSegment]):
    """What `SegmentStock` is for host memory; all of one kind, so huge pages mean nothing here. See `Stock`.

    Segments are allocated one by one; at least `reserve` bytes of the card are left to others. Whoever discards a
    segment has made sure that no process maps it any more. What the loop calls never calls the driver.
    """

    def __init__(
        self,
        context: Context,
        *,
        segment_nbytes: int,
        budget_nbytes: int,
        prefault: Prefault = "background",
        reserve: int = DEFAULT_RESERVE_NBYTES,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`segment_nbytes` is rounded up to whole 2 MiB."""
        super().__init__(
            segment_nbytes=-(-segment_nbytes // SEGMENT_GRANULE_NBYTES) * SEGMENT_GRANULE_NBYTES,
            budget_nbytes=budget_nbytes,
            prefault=prefault,
            on_ready=on_ready,
            thread_name="kvd-device-stock",
            what="device memory",
        )
        self.context = context
        self.reserve = reserve
        self._measure_wanted = False
        self._free_nbytes = self._total_nbytes = 0

    def start(self, min_segment_nbytes: int = MIN_SEGMENT_NBYTES) -> None:
        """Makes the first segment and starts the thread.

        Where a segment does not fit, halves of it are tried down to `min_segment_nbytes`; read `segment_nbytes` after
        this. Raises `CudaOutOfMemory` when not even that fits, `CudaError`.
        """
        self._measure()
        while self._max_segments or self.segment_nbytes > min_segment_nbytes:
            try:
                if self._max_segments:
                    self._ready[False].append(self._make())
                    break
            except CudaOutOfMemory as error:
                if self.segment_nbytes <= min_segment_nbytes:
                    raise
                _log.warning("a device segment of %d MiB does not fit: %s", self.segment_nbytes >> 20, error)
            self.segment_nbytes = max(
                min_segment_nbytes, self.segment_nbytes // 2 // SEGMENT_GRANULE_NBYTES * SEGMENT_GRANULE_NBYTES
            )
            self._max_segments = self._budget_nbytes // self.segment_nbytes
        self._measure()
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the card is gone for good, or None. The pools on it are unavailable then, and `retry()` is in vain."""
        return self.context.lost

    @property
    def free_nbytes(self) -> int:
        """Of the card, as last measured, the reserve included."""
        return self._free_nbytes

    @property
    def total_nbytes(self) -> int:
        """Of the card."""
        return self._total_nbytes

    def available_nbytes(self) -> int:
        """What the card could still give, the reserve left out, as last measured; asks the thread to measure anew."""
        with self._changed:
            self._measure_wanted = True
            self._changed.notify()
        return max(0, self._free_nbytes - self.reserve)

    # Everything below is the stock's own thread (or `start`), or called with the lock held where it says so.

    def _has_more_to_do(self) -> bool:
        return self._measure_wanted

    def _end_turn(self) -> None:
        # Cleared first: whoever asks while it is measured asks for a later moment.
        self._measure_wanted = False
        try:
            self._measure()
        except CudaError as error:
            if self._failed is None:
                self._fail(str(error))
                self._on_ready()

    def _make_one(self, kind: bool) -> None:
        try:
            segment = self._make()
        except KvdError as error:
            self._fail(str(error))
        else:
            self._made(kind, segment)

    def _make(self) -> DeviceSegment:
        free_nbytes, _ = self.context.memory()
        if free_nbytes - self.reserve < self.segment_nbytes:
            raise CudaOutOfMemory(
                f"{self.segment_nbytes >> 20} MiB more would leave less than the {self.reserve >> 20} MiB that are "
                f"reserved for others on the card ({free_nbytes >> 20} MiB are free)"
            )
        return DeviceSegment(self.context, self.segment_nbytes)

    def _measure(self) -> None:
        self._free_nbytes, self._total_nbytes = self.context.memory()
