"""A client that keeps the daemon's loop busy and times each begin: `python -m kvd.bench.load RUNTIME_DIR`.

It begins a resident prefix of 256 blocks, and releases it, every `PERIOD_S`, as a few engines would. It starts at the
line "go" on its standard input and stops at the next line, when it prints the times as a JSON list of seconds.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import kvd_client
from kvd.bench.begin import NUM_BLOCKS, packed_hashes, timed_begin
from kvd.bench.row import CannotMeasure
from kvd.bench.shapes import ONE_PAGE, prompt
from kvd.bench.writer import seal_prompt

PERIOD_S = 0.002
MODEL = "bench load"
STOP_BOUND_S = 10.0


class Load:
    """The process, from outside. A context manager; `go` and `stop` enclose what is to happen under load."""

    def __init__(self, runtime_dir: Path) -> None:
        argv = [sys.executable, "-m", "kvd.bench.load", str(runtime_dir)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._said() != "ready":
            raise CannotMeasure("the load's process did not start")

    def go(self) -> None:
        """Returns when it runs."""
        self._tell("go")
        self._said()

    def stop(self) -> list[float]:
        """Seconds of each begin since `go`."""
        self._tell("stop")
        times: list[float] = json.loads(self._said())
        return times

    def _tell(self, word: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    def _said(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise CannotMeasure("the load's process ended")
        return line.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process as process:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP_BOUND_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main(runtime_dir: str) -> None:
    """Serves until standard input ends."""
    with kvd_client.connect(runtime_dir, label="kvd bench load") as client:
        cache = client.cache(model=MODEL, layout=ONE_PAGE)
        ids = prompt(1, NUM_BLOCKS * ONE_PAGE.block_tokens)
        seal_prompt(cache, ids)
        runner = client._runner
        packed = runner.run(lambda link: packed_hashes(link, cache.namespace, ids))
        print("ready", flush=True)
        while _next_line():
            print("going", flush=True)
            times: list[float] = []
            due_s = time.perf_counter()
            while not select.select([0], [], [], max(0.0, due_s - time.perf_counter()))[0]:
                due_s = max(due_s + PERIOD_S, time.perf_counter())
                times.append(runner.run(lambda link: timed_begin(link, cache.namespace, packed)))
            _next_line()
            print(json.dumps(times), flush=True)


def _next_line() -> bytes:
    """From the descriptor itself: a buffered reader would hide from `select` what it has read already."""
    line = b""
    while not line.endswith(b"\n"):
        char = os.read(0, 1)
        if not char:
            return b""
        line += char
    return line


if __name__ == "__main__":
    main(sys.argv[1])
