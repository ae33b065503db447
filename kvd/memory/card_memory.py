"""All that a daemon has on one card, together there or together given up: the context, the stock, the copy engine."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from kvd.cuda import Device, Driver
from kvd.errors import CudaError, CudaUnavailable, KvdError
from kvd.memory.device_copies import CopyEngine
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.device_stock import MIN_SEGMENT_NBYTES, DeviceStock
from kvd.memory.making import Prefault
from kvd.memory.segment import HostSegment
from kvd.memory.segment_locks import SegmentLocks

_log = logging.getLogger(__name__)


class CardMemory:
    """A `DeviceStock` that can be away: then it has nothing, makes nothing, and the card may go to its lowest power.

    `open` and `close` block; `restore` and `release` do the same on a thread, and `on_ready` is called when that is
    through. Everything else is for the loop and never waits. A budget that is set while it is away holds when it is
    back; the size of segments never changes once it was open.
    """

    def __init__(
        self,
        driver: Driver,
        device: Device,
        *,
        decide: Callable[[int, int], tuple[int, int]],
        prefault: Prefault = "background",
        reserve: int = 0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`decide(free_nbytes, total_nbytes)` gives budget and segment size, once the card is open for the first time.

        `on_ready` is called on threads of this and of the stock; it must neither block nor raise.
        """
        self.device = device
        self.segment_nbytes = 0
        self.reserve = reserve
        self.failure: KvdError | None = None
        """Why it did not come back the last time."""
        self._driver = driver
        self._decide = decide
        self._prefault = prefault
        self._on_ready = on_ready
        self._budget_nbytes = 0
        self._setting_budget = threading.Lock()
        """So that a budget set while the card opens is the stock's, too. Held for moments only."""
        self._stock: DeviceStock | None = None
        self._engine: CopyEngine | None = None
        self._locks: SegmentLocks | None = None
        self._opened = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._is_changing = False
        self._total_nbytes = device.total_nbytes

    # Its life.

    def open(self) -> None:
        """Makes the first segment. Raises `CudaError`; nothing is left behind then."""
        with contextlib.ExitStack() as opened:
            context = opened.enter_context(self._driver.open(self.device))
            is_first = not self.segment_nbytes
            if is_first:
                self._budget_nbytes, self.segment_nbytes = self._decide(*context.memory())
            stock = DeviceStock(
                context,
                segment_nbytes=self.segment_nbytes,
                budget_nbytes=self._budget_nbytes,
                prefault=self._prefault,
                reserve=self.reserve,
                on_ready=self._on_ready,
            )
            opened.callback(stock.close)
            # Pools count on the size that they were told at the first time.
            stock.start(MIN_SEGMENT_NBYTES if is_first else self.segment_nbytes)
            engine = CopyEngine(context)
            opened.callback(engine.close)
            locks = SegmentLocks(context)
            opened.callback(locks.close)
            self._opened = opened.pop_all()
        self.segment_nbytes = stock.segment_nbytes
        with self._setting_budget:
            stock.set_budget(self._budget_nbytes)
            self._engine, self._locks, self._stock = engine, locks, stock

    def close(self) -> None:
        """Gives everything back; nobody copies or maps anything any more. Never raises; idempotent."""
        if self._thread is not None:
            self._thread.join()
        self._take_apart()()

    def restore(self) -> None:
        """Begins to open it, on a thread; `failure` says afterwards why that was in vain, `is_open` that it was not."""
        # Unless it ends as it should.
        self.failure = CudaUnavailable(f"{self.device} did not come back")
        self._change(self._open_quietly)

    def release(self) -> None:
        """Begins to close it, on a thread. Every segment that was taken has been discarded before."""
        self._change(self._take_apart())

    @property
    def is_open(self) -> bool:
        """Whether memory can be had, or will be without anybody's doing."""
        return self._stock is not None

    @property
    def is_changing(self) -> bool:
        """Whether it is on its way there or away."""
        return self._is_changing

    # What a stock has; see `DeviceStock`.

    @property
    def engine(self) -> CopyEngine:
        """What copies there. Raises `CudaUnavailable` while it is away."""
        engine = self._engine
        if engine is None:
            raise CudaUnavailable(f"{self.device} is released; open a cache there to have it back")
        return engine

    def lock(self, segment: HostSegment) -> None:
        """Page-locks host memory that blocks are copied to and from, as long as this is there; it may take its time."""
        locks = self._locks
        if locks is not None:
            locks.lock(segment)

    @property
    def failed(self) -> str | None:
        """Why memory could not be had the last time."""
        stock = self._stock
        return None if stock is None else stock.failed

    @property
    def lost(self) -> str | None:
        """Why the card is gone for good."""
        stock = self._stock
        return None if stock is None else stock.lost

    @property
    def ready_nbytes(self) -> int:
        """Bytes of segments ready to be taken."""
        stock = self._stock
        return 0 if stock is None else stock.ready_nbytes

    @property
    def free_nbytes(self) -> int:
        """Of the card, as last measured; nobody asks it while this is away."""
        stock = self._stock
        return 0 if stock is None else stock.free_nbytes

    @property
    def total_nbytes(self) -> int:
        """Of the card."""
        stock = self._stock
        return self._total_nbytes if stock is None else stock.total_nbytes

    def take(self, *, huge_pages: bool = False) -> DeviceSegment | None:
        """A segment that is ready, or None."""
        stock = self._stock
        return None if stock is None else stock.take(huge_pages=huge_pages)

    def request(self, num_segments: int, *, huge_pages: bool = False) -> None:
        """Asks for segments; nothing comes of it while it is away."""
        stock = self._stock
        if stock is not None:
            stock.request(num_segments, huge_pages=huge_pages)

    def withdraw(self) -> None:
        """Whoever asked waits no longer."""
        stock = self._stock
        if stock is not None:
            stock.withdraw()

    def discard(self, segment: DeviceSegment) -> None:
        """Takes a segment back that no process maps."""
        stock = self._stock
        if stock is not None:
            stock.discard(segment)

    def retry(self) -> None:
        """Forgets a failure to make segments."""
        stock = self._stock
        if stock is not None:
            stock.retry()

    def set_budget(self, budget_nbytes: int) -> None:
        """From now on, or from its return on, at most this much."""
        with self._setting_budget:
            self._budget_nbytes = budget_nbytes
            stock = self._stock
            if stock is not None:
                stock.set_budget(budget_nbytes)

    def available_nbytes(self) -> int:
        """What the card could still give."""
        stock = self._stock
        return 0 if stock is None else stock.available_nbytes()

    def _change(self, step: Callable[[], None]) -> None:
        def run() -> None:
            try:
                step()
            finally:
                self._is_changing = False
                self._on_ready()

        self._is_changing = True
        self._thread = threading.Thread(target=run, name="kvd-card", daemon=True)
        self._thread.start()

    def _open_quietly(self) -> None:
        try:
            self.open()
        except KvdError as error:
            self.failure = error
        else:
            self.failure = None

    def _take_apart(self) -> Callable[[], None]:
        """From now on nothing can be had here; what closes it is returned."""
        self._stock = self._engine = self._locks = None
        opened, self._opened = self._opened, contextlib.ExitStack()

        def close() -> None:
            try:
                opened.close()
            except CudaError as error:
                _log.error("%s was not closed: %s", self.device, error)

        return close
