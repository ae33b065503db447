"""A bar for what the daemon does in the background, and the patience to watch it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kvd.cli.console import console

LOOK_EVERY_S = 0.05
PATIENCE_S = 10.0
"""Without any progress."""


@dataclass(slots=True)
class Watch:
    """How far something has come. `moved` says whether waiting on makes sense."""

    progress: Progress
    patience_s: float
    quiet_until_s: float = 0.0
    """Nothing is shown before."""
    _done: int = -1
    _since_s: float = 0.0

    def moved(self, done: int, total: int) -> bool:
        """Shows it and pauses; False when nothing has moved for too long, or all is done."""
        now_s = time.monotonic()
        if done != self._done:
            self._done, self._since_s = done, now_s
        if now_s >= self.quiet_until_s:
            self.progress.start()
        self.progress.update(self.progress.task_ids[0], completed=done, total=total)
        if done >= total or now_s - self._since_s >= self.patience_s:
            return False
        time.sleep(LOOK_EVERY_S)
        return True


@contextmanager
def watching(what: str, *, patience_s: float = PATIENCE_S, quiet_s: float = 0.0) -> Iterator[Watch]:
    """A bar on a terminal, after `quiet_s`, and nothing elsewhere; gone at the end."""
    err = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal)
    bar.add_task(what, total=None)
    try:
        yield Watch(bar, patience_s, time.monotonic() + quiet_s)
    finally:
        bar.stop()
