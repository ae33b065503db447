"""The eight client processes of a soak: started, killed one a second and replaced, and asked at the end."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_WORKERS = 8


class Workers:
    """Processes running `tests.soak.worker`, and what they reported."""

    def __init__(self, folder: Path, *, num_prefixes: int) -> None:
        self.reports: list[dict[str, int]] = []
        self._arguments = [sys.executable, "-m", "tests.soak.worker", str(folder)]
        self._num_prefixes = num_prefixes
        self._num_started = 0
        self._processes: list[subprocess.Popen[str]] = []
        self._choose = random.Random(20)
        for _ in range(NUM_WORKERS):
            self._start()

    def run(self, duration_s: float, between: Callable[[float], None] = lambda _elapsed_s: None) -> None:
        """Kills and replaces a process each second; calls `between` with the time elapsed; ten times a second."""
        start = time.monotonic()
        next_kill_s = 1.0
        while (elapsed_s := time.monotonic() - start) < duration_s:
            select.select([], [], [], 0.1)
            between(elapsed_s)
            self._check_alive()
            if elapsed_s >= next_kill_s:
                next_kill_s += 1
                victim = self._processes.pop(self._choose.randrange(NUM_WORKERS))
                os.kill(victim.pid, signal.SIGKILL)
                self._collect(victim, killed=True)
                self._start()

    def stop(self) -> None:
        """Closes their standard input, which ends them, and takes in their reports."""
        while self._processes:
            self._collect(self._processes.pop(), killed=False)

    def total(self, name: str) -> int:
        """One figure, summed over all processes that lived to report it."""
        return sum(report.get(name, 0) for report in self.reports)

    def _start(self) -> None:
        self._num_started += 1
        command = [*self._arguments, str(self._num_started), str(self._num_prefixes)]
        self._processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )

    def _check_alive(self) -> None:
        # A worker ends by itself only when it saw a wrong byte or an error it does not expect.
        for process in self._processes:
            assert process.poll() is None, process.communicate()

    def _collect(self, process: subprocess.Popen[str], *, killed: bool) -> None:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if killed else 0), output
        self.reports += [json.loads(line) for line in output.splitlines()]
