"""What the service manager hears while the daemon serves: that the loop turns, and one line on how it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvd.service import Service
from kvd.systemd import Notifier

STATUS_EVERY_S = 5.0


class ManagerReports:
    """Call `beat` at each heartbeat of the loop, and from nowhere else: a loop that hangs must fall silent."""

    def __init__(self, notifier: Notifier, clock: Callable[[], float] = time.monotonic) -> None:
        self._notifier = notifier
        self._clock = clock
        self._alive_due_s = self._status_due_s = clock()

    def beat(self, describe: Callable[[], str] | None) -> None:
        """Feeds the watchdog when that is due, and now and then sends what `describe` returns, if there is one."""
        now_s = self._clock()
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is not None and now_s >= self._alive_due_s:
            self._alive_due_s = now_s + interval_s
            self._notifier.alive()
        if describe is not None and now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_EVERY_S
            self._notifier.status(describe())


def status_line(service: Service) -> str:
    """Where it serves, how many, with how much memory, and which tier is not well. Names no client and no model.

    Everybody on the machine can read it, so behind walls between users it counts nothing.
    """
    parts = [f"serving {service.runtime_dir}"]
    if service.settings.isolation != "uid":
        usage, num_sessions = service.pools.usage(), len(service.sessions)
        parts[0] += (
            f": {num_sessions} session{'' if num_sessions == 1 else 's'}, "
            f"{usage.used_nbytes >> 20} of {usage.budget_nbytes >> 20} MiB in pools"
        )
    if service.below is not None:
        parts += [f"{tier.name} is {tier.state}: {tier.reason}" for tier in service.below.statuses() if tier.reason]
    return "; ".join(parts)
