"""A circuit breaker: after a few failures nobody asks for a while; then one call tries, and all follow if it works."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.errors import TierError, TierFull, TierRefused, TierUnavailable


class BreakerState(enum.Enum):
    """The values are the words that `kvd status` shows."""

    CLOSED = "up"  # calls go through
    OPEN = "down"  # calls fail at once until the backoff is over
    HALF_OPEN = "probing"  # one call is on its way; the others still fail at once


@dataclass(frozen=True, slots=True)
class BreakerView:
    """A breaker at one moment."""

    state: BreakerState
    reason: str
    retry_in_s: float


class CircuitBreaker:
    """Guards calls to something that may be down. Thread-safe; the lock is never held during a call.

    It opens after `threshold` failures in a row, at once when the other side refuses us, and stays open for
    `first_backoff_s`, doubled at each failed probe up to `max_backoff_s`. `trips` names the failures that count; every
    other end of a call means that the other side answered, and closes it.
    """

    def __init__(
        self,
        *,
        threshold: int = 3,
        first_backoff_s: float = 0.25,
        max_backoff_s: float = 15.0,
        trips: type[TierError] = TierUnavailable,
        refusal: type[TierError] = TierUnavailable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self._trips = trips
        self._refusal = refusal
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_failures = 0
        self._backoff_s = first_backoff_s
        self._retry_at_s = 0.0
        self._reason = ""
        self._cause = ""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run one call. Raises the refusal error at once, with the reason, while the breaker is open."""
        self.enter()
        try:
            yield
        except self._trips as error:
            self.failed(error)
            raise
        except TierError:
            self.succeeded()
            raise
        except BaseException:
            # An exception from elsewhere says nothing about the other side; a probe must still end.
            self._abandoned()
            raise
        self.succeeded()

    def enter(self) -> None:
        """Ask to make one call, which must end in `succeeded` or `failed`."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return
            if self._state is BreakerState.OPEN and self._clock() >= self._retry_at_s:
                # Only the caller who makes this move may call: there is never more than one probe.
                self._state = BreakerState.HALF_OPEN
                return
            raise self._refusal(self._reason, cause=f"{self._cause}-waiting")

    def may_enter(self) -> bool:
        """False while it is open and no probe is due. Takes no lock."""
        return self._state is not BreakerState.OPEN or self._clock() >= self._retry_at_s

    def succeeded(self) -> None:
        """The other side answered."""
        with self._lock:
            self._state = BreakerState.CLOSED
            self._num_failures = 0
            self._backoff_s = self._first_backoff_s
            self._reason = ""

    def failed(self, error: TierError) -> None:
        """It did not, or not usefully."""
        with self._lock:
            self._num_failures += 1
            self._reason = str(error)
            self._cause = error.cause
            if self._state is BreakerState.HALF_OPEN:
                self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
            elif (
                self._state is BreakerState.CLOSED
                and self._num_failures < self._threshold
                and not isinstance(error, (TierRefused, TierFull))
            ):
                return
            if self._state is not BreakerState.OPEN:
                self._state = BreakerState.OPEN
                self._retry_at_s = self._clock() + self._backoff_s

    def _abandoned(self) -> None:
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._state = BreakerState.OPEN
                self._retry_at_s = self._clock() + self._backoff_s

    def view(self) -> BreakerView:
        """For status; waits for nobody."""
        with self._lock:
            waits = self._state is BreakerState.OPEN
            retry_in_s = max(0.0, self._retry_at_s - self._clock()) if waits else 0.0
            return BreakerView(self._state, self._reason, retry_in_s)
