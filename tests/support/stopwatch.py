"""How long something takes, however busy the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.wait import eventually


class Stopwatch:
    """Runs from its making on, and leaves out what threads that matter waited for a processor in that time.

    Those are the thread that makes it and the main threads of the processes named; at the end others may be named that
    have begun since.
    """

    def __init__(self, *pids: int) -> None:
        self._tasks = (threading.get_native_id(), *pids)
        self._start_s = time.monotonic() - _queued_s(*self._tasks)

    def elapsed_s(self, *started: int) -> float:
        return time.monotonic() - _queued_s(*self._tasks, *started) - self._start_s


def within(seconds: float, condition: Callable[[], object], *pids: int) -> None:
    """Fails when it takes longer until the condition is true, by a stopwatch over these processes."""
    watch = Stopwatch(*pids)
    eventually(condition)
    taken_s = watch.elapsed_s()
    assert taken_s < seconds, f"it took {taken_s:.2f} s"


def _queued_s(*tasks: int) -> float:
    """Seconds they have stood in the scheduler's queue, in all."""
    return sum(int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) for task in tasks) / 1e9
