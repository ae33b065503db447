"""How long a begin takes: one that has to ask the tiers below, beside one that never does.

What either process waited for a processor in that time is left out: it says how busy the machine is, nothing of Redis.
A machine may also be stopped whole for a moment, by whatever runs it, and no figure says so: that makes a begin late
now and then; a tier that is waited for makes all of them late for as long as it is in trouble.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import kvd_client
from kvd.errors import OutOfBlocks
from tests.soak.content import LAYOUT, MODEL

_NUM_TOKENS = 8 * LAYOUT.block_tokens + 1
_ON_TIME_S = 0.1


class Probe:
    """Two kinds of begin in turn, over prompts that nobody else uses: neither ever waits for another process."""

    def __init__(self, folder: Path, daemon_pid: int) -> None:
        self._pids = (daemon_pid, os.getpid())
        self._below_s: list[float] = []
        self._resident_s: list[float] = []
        self._client = kvd_client.connect(folder, label="probe")
        self._cache = self._client.cache(model=MODEL, layout=LAYOUT, salt="probe")
        self._first_tokens = itertools.count(1 << 20)
        self._resident = [7] * _NUM_TOKENS
        self._held = self._cache.sequence(self._resident)
        self._held.advance(_NUM_TOKENS)
        self._held.commit()

    def measure(self) -> None:
        """One begin of each kind: a prompt never seen, which must be asked for below, and one that is held resident."""
        unseen = [next(self._first_tokens)] * _NUM_TOKENS
        self._below_s.append(self._begin_s(unseen))
        self._resident_s.append(self._begin_s(self._resident))

    def late_s(self) -> list[float]:
        """By how much each late one was late that asked below: beyond 100 ms more than the longest that never asks."""
        bound_s = max(self._resident_s) + _ON_TIME_S
        return [taken_s - bound_s for taken_s in self._below_s if taken_s > bound_s]

    def _begin_s(self, token_ids: list[int]) -> float:
        start_s, queued_s = time.monotonic(), self._queued_s()
        try:
            self._cache.sequence(token_ids, announce=False).close()
        except OutOfBlocks:
            return 0.0  # everything is held just now; that is no matter of Redis
        return time.monotonic() - start_s - (self._queued_s() - queued_s)

    def _queued_s(self) -> float:
        """Seconds that the threads a begin passes through have stood in the scheduler's queue, in all."""
        return sum(_run_delay_s(task) for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        self._client.close()


def _run_delay_s(task: Path) -> float:
    # Threads that copy blocks, which are nicer than the others, wait all the time, and no begin waits for them.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if os.getpriority(os.PRIO_PROCESS, int(task.name)) <= os.getpriority(os.PRIO_PROCESS, int(task.parts[2])):
            return int((task / "schedstat").read_text().split()[1]) / 1e9
    return 0.0
