"""What sharing has saved: tokens that were found, and the seconds their prefill would have taken.

Tokens are counted by the daemon. Seconds need a rate that only who computes can know: clients report how many tokens
they computed and how long that took, and for each namespace

    prefill seconds saved = tokens found / (tokens computed / seconds taken)

over all such reports of that namespace. Tokens of a namespace that nobody has reported a computation of count as
tokens only. It is an estimate: attention makes late tokens dearer than early ones, and clients may run at different
speeds.
"""

from __future__ import annotations

import math
from collections import defaultdict

from kvd.errors import InvalidRequest
from kvd.protocol.requests import COMPUTED_EARLIER_S
from kvd.service.sessions import Cache, Session
from kvd.status import SavingsStatus

MAX_REPORTED_TOKENS = 1 << 24
"""In one report."""


class Savings:
    """By tenant, since the daemon's start. Loop thread only."""

    def __init__(self) -> None:
        self._ended: defaultdict[str, SavingsStatus] = defaultdict(lambda: NOTHING)
        """By tenant: what the sessions that have ended had saved, at the rates known then."""

    @staticmethod
    def check(session: Session, num_tokens: int, seconds: float, now_s: float) -> None:
        """Raises `InvalidRequest` for a computation that cannot have been."""
        if not num_tokens and not seconds:
            return
        if not 0 < num_tokens <= MAX_REPORTED_TOKENS or not math.isfinite(seconds) or seconds <= 0:
            raise InvalidRequest(f"{num_tokens} tokens computed in {seconds} seconds")
        # What was computed before the session began was not computed for it.
        if seconds > now_s - session.connected_s + COMPUTED_EARLIER_S:
            raise InvalidRequest(f"{seconds:.3f} s of computing are more than the session is old")

    @staticmethod
    def computed(cache: Cache, num_tokens: int, seconds: float) -> None:
        """A client says that it computed so many tokens of the namespace in so many seconds; `check` was called.

        Its word changes this estimate and nothing else.
        """
        cache.namespace.computed_tokens += num_tokens
        cache.namespace.computed_s += seconds

    def of(self, session: Session) -> SavingsStatus:
        """What one session was spared, at the rates known now."""
        total = NOTHING
        for handle, num_tokens in session.saved.items():
            namespace = session.caches[handle].namespace
            if namespace.computed_tokens:
                seconds = num_tokens * namespace.computed_s / namespace.computed_tokens
                total = _sum(
                    total, SavingsStatus(num_tokens=num_tokens, num_tokens_rated=num_tokens, prefill_s=seconds)
                )
            else:
                total = _sum(total, SavingsStatus(num_tokens=num_tokens, num_tokens_rated=0, prefill_s=0.0))
        return total

    def ended(self, session: Session) -> None:
        """The session is over; what it was spared stays in the total."""
        if session.saved:
            self._ended[session.tenant] = _sum(self._ended[session.tenant], self.of(session))

    def total(self, sessions: list[Session], tenants: set[str] | None = None) -> SavingsStatus:
        """Of all sessions, living (`sessions`) and ended; with `tenants`, of theirs only."""
        total = NOTHING
        for tenant, ended in self._ended.items():
            if tenants is None or tenant in tenants:
                total = _sum(total, ended)
        for session in sessions:
            if tenants is None or session.tenant in tenants:
                total = _sum(total, self.of(session))
        return total


NOTHING = SavingsStatus(num_tokens=0, num_tokens_rated=0, prefill_s=0.0)


def _sum(left: SavingsStatus, right: SavingsStatus) -> SavingsStatus:
    return SavingsStatus(
        num_tokens=left.num_tokens + right.num_tokens,
        num_tokens_rated=left.num_tokens_rated + right.num_tokens_rated,
        prefill_s=left.prefill_s + right.prefill_s,
    )
