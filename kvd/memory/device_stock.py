"""Device segments made on a thread of their own, as many as the card, its other users and the budget allow."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvd.cuda import SEGMENT_GRANULE_NBYTES, Context
from kvd.errors import CudaError, CudaOutOfMemory, KvdError
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.stock import Prefault

DEFAULT_RESERVE_NBYTES = 512 << 20
MIN_SEGMENT_NBYTES = 8 << 20
"""Below this the number of handles, each opened by every client, costs more than a shortage."""
_log = logging.getLogger(__name__)


class DeviceStock:
    """What `SegmentStock` is for host memory: take, request, discard, retry, set_budget, and the same figures.

    "background" fills the whole budget ahead of need, "lazy" makes what `request` asks for. Segments are allocated one
    by one; when the card has no more, what there is stays, `failed` tells why and nothing is made until `retry()`. At
    least `reserve` bytes of the card are left to others.

    Invariant, whenever the lock is free: taken + ready + being made <= budget (in segments), except after a budget was
    lowered below what is taken. A segment that was taken once is never handed out again.

    `take`, `request`, `discard`, `retry`, `set_budget` and the figures never call the driver, and may be called from
    any one thread beside the stock's own. Whoever discards a segment has made sure that no process maps it any more.
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
        """`segment_nbytes` is rounded up to whole 2 MiB.

        `on_ready` is called on the stock's thread after each segment made and each failure, without the lock; it must
        neither block nor raise.
        """
        self.context = context
        self.segment_nbytes = -(-segment_nbytes // SEGMENT_GRANULE_NBYTES) * SEGMENT_GRANULE_NBYTES
        self.reserve = reserve
        self._budget_nbytes = budget_nbytes
        self._prefault = prefault
        self._on_ready = on_ready
        self._changed = threading.Condition()
        self._max_segments = budget_nbytes // self.segment_nbytes
        self._ready: deque[DeviceSegment] = deque()
        self._discarded: deque[DeviceSegment] = deque()
        self._wanted = 0
        self._num_taken = 0
        self._num_making = 0
        self._failed: str | None = None
        self._told = False  # the log has the failure already; retries that fail again are not worth a line each
        self._stopping = False
        self._measure_wanted = False
        self._free_nbytes = self._total_nbytes = 0
        self._thread = threading.Thread(target=self._run, name="kvd-device-stock", daemon=True)

    def start(self, min_segment_nbytes: int = MIN_SEGMENT_NBYTES) -> None:
        """Makes the first segment and starts the thread.

        Where a segment does not fit, halves of it are tried down to `min_segment_nbytes`; read `segment_nbytes` after
        this. Raises `CudaOutOfMemory` when not even that fits, `CudaError`.
        """
        self._measure()
        while self._max_segments or self.segment_nbytes > min_segment_nbytes:
            try:
                if self._max_segments:
                    self._ready.append(self._make())
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

    def close(self) -> None:
        """Stops the thread and gives back what is ready; waits at most for one allocation. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for shelf in (self._ready, self._discarded):
            while shelf:
                shelf.popleft().close()

    def take(self, *, huge_pages: bool = False) -> DeviceSegment | None:
        """A segment that is ready, for the caller to own, or None: then `request` it and wait for `on_ready`.

        `huge_pages` means nothing here.
        """
        with self._changed:
            if not self._ready:
                return None
            self._num_taken += 1
            self._wanted = max(0, self._wanted - 1)
            self._changed.notify()
            return self._ready.popleft()

    def request(self, num_segments: int, *, huge_pages: bool = False) -> None:
        """Asks that `num_segments` be ready to be taken, as far as the budget allows. Asking twice is asking once."""
        with self._changed:
            self._wanted = max(self._wanted, num_segments)
            self._changed.notify()

    def withdraw(self) -> None:
        """Whoever asked waits no longer: nothing is made for the requests of before."""
        with self._changed:
            self._wanted = 0

    def discard(self, segment: DeviceSegment) -> None:
        """Takes back a taken segment that no process maps any more; the stock's thread frees it."""
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
        """From now on at most this much; ready segments above it are freed, taken ones are the pools' affair."""
        with self._changed:
            self._max_segments = budget_nbytes // self.segment_nbytes
            while self._ready and self._num_held() > self._max_segments:
                self._discarded.append(self._ready.pop())
            self._changed.notify()

    @property
    def failed(self) -> str | None:
        """Why memory could not be had the last time, until `retry()` or None."""
        return self._failed

    @property
    def lost(self) -> str | None:
        """Why the card is gone for good, or None. The pools on it are unavailable then, and `retry()` is in vain."""
        return self.context.lost

    @property
    def ready_nbytes(self) -> int:
        """Bytes of segments ready to be taken."""
        return len(self._ready) * self.segment_nbytes

    @property
    def taken_nbytes(self) -> int:
        """Bytes of segments that were taken and not yet discarded."""
        return self._num_taken * self.segment_nbytes

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

    def _num_held(self) -> int:
        return self._num_taken + self._num_making + len(self._ready)

    def _may_make(self) -> bool:
        """With the lock held."""
        return (
            self._failed is None
            and self._num_held() < self._max_segments
            and (self._prefault == "background" or self._wanted > len(self._ready))
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._discarded or self._measure_wanted or self._may_make()):
                    self._changed.wait()
                if self._stopping:
                    return
                self._measure_wanted = False
                # Memory that comes back is freed first: it may be what the next segment needs.
                making = not self._discarded and self._may_make()
                self._num_making = int(making)
            self._free_discarded()
            if making:
                self._make_one()
                self._on_ready()
            self._measure_or_fail()

    def _make_one(self) -> None:
        try:
            segment = self._make()
        except KvdError as error:
            self._fail(str(error))
        else:
            with self._changed:
                self._num_making, self._told = 0, False
                self._ready.append(segment)

    def _make(self) -> DeviceSegment:
        free_nbytes, _ = self.context.memory()
        if free_nbytes - self.reserve < self.segment_nbytes:
            raise CudaOutOfMemory(
                f"{self.segment_nbytes >> 20} MiB more would leave less than the {self.reserve >> 20} MiB that are "
                f"reserved for others on the card ({free_nbytes >> 20} MiB are free)"
            )
        return DeviceSegment(self.context, self.segment_nbytes)

    def _fail(self, reason: str) -> None:
        with self._changed:
            # Whoever waited is refused now, and asks again if it still wants any when there is memory again.
            self._num_making, self._failed, self._wanted = 0, reason, 0
            told, self._told = self._told, True
        if not told:
            _log.warning("no more device memory for segments, going on with %d: %s", self._num_held(), reason)

    def _free_discarded(self) -> None:
        while True:
            with self._changed:
                if not self._discarded:
                    return
                segment = self._discarded.popleft()
            segment.close()

    def _measure_or_fail(self) -> None:
        try:
            self._measure()
        except CudaError as error:
            if self._failed is None:
                self._fail(str(error))
                self._on_ready()

    def _measure(self) -> None:
        self._free_nbytes, self._total_nbytes = self.context.memory()
