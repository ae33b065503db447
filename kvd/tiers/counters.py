"""What a tier counts. Written by any mover thread, read by `kvd status`; one short lock, no I/O under it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kvd.errors import BlockCorrupt, BlockMissing, CodecUnavailable, TierError
from kvd.status import TierStatus, TierUsage

_MISSES = (BlockMissing, BlockCorrupt, CodecUnavailable)


class TierCounters:
    """Counters of one tier since the daemon's start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._read_s = 0.0
        self._write_s = 0.0
        self._usage: TierUsage | None = None
        self._usage_at_s = 0.0

    def reads(self, outcomes: Iterable[TierError | None], *, nbytes: int, seconds: float) -> None:
        """A batch of gets came back: `nbytes` bytes of blocks in the ones that hit."""
        with self._lock:
            for outcome in outcomes:
                if outcome is None:
                    self._counts["hits"] += 1
                    continue
                if isinstance(outcome, _MISSES):
                    self._counts["misses"] += 1
                # A block that is simply not there is the everyday case, not a fault.
                if outcome.cause != BlockMissing.code:
                    self._errors[outcome.cause] += 1
            self._counts["read_nbytes"] += nbytes
            self._read_s += seconds if nbytes else 0.0

    def writes(self, outcomes: Iterable[TierError | None], *, nbytes: int, seconds: float) -> None:
        """A batch of puts came back: `nbytes` bytes of blocks in the ones that were stored."""
        with self._lock:
            for outcome in outcomes:
                if outcome is None:
                    self._counts["puts"] += 1
                else:
                    self._errors[outcome.cause] += 1
            self._counts["written_nbytes"] += nbytes
            self._write_s += seconds if nbytes else 0.0

    def deletes(self, num_blocks: int) -> None:
        """Blocks were deleted on request."""
        with self._lock:
            self._counts["deletes"] += num_blocks

    def error(self, error: TierError) -> None:
        """A call failed that is neither a get nor a put."""
        with self._lock:
            self._errors[error.cause] += 1

    def measured(self, usage: TierUsage) -> TierUsage:
        """The tier said what it holds."""
        with self._lock:
            self._usage = usage
            self._usage_at_s = self._clock()
        return usage

    def status(
        self,
        *,
        name: str,
        kind: str,
        address: str = "",
        state: str = "up",
        reason: str = "",
        retry_in_s: float = 0.0,
        details: dict[str, str] | None = None,
    ) -> TierStatus:
        """One consistent picture."""
        with self._lock:
            counts = self._counts
            return TierStatus(
                name=name,
                kind=kind,
                address=address,
                state=state,
                reason=reason,
                retry_in_s=retry_in_s,
                num_hits=counts["hits"],
                num_misses=counts["misses"],
                num_puts=counts["puts"],
                num_deletes=counts["deletes"],
                read_nbytes=counts["read_nbytes"],
                read_s=self._read_s,
                written_nbytes=counts["written_nbytes"],
                write_s=self._write_s,
                errors=dict(self._errors),
                usage=self._usage,
                usage_age_s=self._clock() - self._usage_at_s if self._usage else 0.0,
                details=details or {},
            )
