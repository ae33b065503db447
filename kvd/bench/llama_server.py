"""llama_server_ttft_1500: a second llama-server goes on where the first has been, with the real SmolLM2-135M.

Timed: the first token of a prompt of about 1,550 tokens, from the request on, by the second of two servers behind
`kvd llama-server`. The first 1,500 were computed by the first one and kept as a snapshot: finding it, bringing it up
and into a slot are all in it. Limit: the first token of the same text, with another question at its end, by the first
server, which has never seen it. Each round has a text of its own. Ratio: limit / value.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target
from kvd.bench.shapes import MIB
from kvd.bench.smollm2 import model_file

T = TypeVar("T")
NUM_SHARED = 1500
NUM_LINES = 110
WARM_UP_LINES = 10
MAX_ROUNDS = 5
"""A cold prefill takes a core for fifteen seconds."""
START_BOUND_S = 60.0
REQUEST_BOUND_S = 300.0
LOOK_EVERY_S = 0.02

TTFT = Target(name="llama_server_ttft_1500", unit="ms", text=">= 10x faster than the cold prefill", at_least=10)


class Server:
    """`kvd llama-server` with one slot; a context manager that is left when both processes have ended."""

    def __init__(self, runtime_dir: Path, model: Path) -> None:
        # A core for each server: where they share one, waiting for each other is all that would be measured.
        num_threads = str(max(1, (os.cpu_count() or 2) // 2))
        command = [sys.executable, "-m", "kvd.cli", "llama-server", "--runtime-dir", str(runtime_dir), "--"]
        options = ["-m", str(model), "-c", "4096", "-np", "1", "-t", num_threads, "-tb", num_threads, "--port", "0"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("KVD_", "LLAMA_"))}
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        self._log_path = Path(self._folder.name) / "log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *options], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._port = 0

    def start(self) -> None:
        """Returns when it serves with snapshots. Raises `CannotMeasure` with the server's own words."""
        self._port = self._eventually(self._listens_at, START_BOUND_S)
        self._eventually(lambda: not self.status()["why_not"], START_BOUND_S)

    def status(self) -> dict[str, Any]:
        """What the proxy tells of itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_BOUND_S)
        try:
            connection.request("GET", "/kvd/status")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found
        finally:
            connection.close()

    def first_token_s(self, prompt: str) -> tuple[float, dict[str, Any]]:
        """Seconds to the first piece of a streamed answer, and the answer's timings."""
        body = {"prompt": prompt, "n_predict": 2, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_BOUND_S)
        try:
            start = time.perf_counter()
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            # What keeps the connection alive begins with a colon.
            first = next((line for line in response if line.strip() and not line.startswith(b":")), b"")
            seconds = time.perf_counter() - start
            if not first.startswith(b"data:"):
                raise CannotMeasure(f"llama-server answered {response.status}: {first.decode(errors='replace')}")
            last = response.read().rstrip().rpartition(b"data:")[2]
            timings: dict[str, Any] = json.loads(last)["timings"]
            return seconds, timings
        finally:
            connection.close()

    def await_saves(self, count: int) -> None:
        """Until so many snapshots were kept."""
        self._eventually(lambda: self.status()["counters"]["saves"] >= count, START_BOUND_S)

    def _listens_at(self) -> int:
        if self._process.poll() is not None:
            raise CannotMeasure(f"llama-server did not start: {self._said()[-200:]}")
        found = re.search(r"http://127.0.0.1:(\d+)", self._said())
        return int(found[1]) if found else 0

    def _said(self) -> str:
        return self._log_path.read_text(errors="replace")

    def _eventually(self, look: Callable[[], T], bound_s: float) -> T:
        deadline = time.perf_counter() + bound_s
        while not (found := look()):
            if time.perf_counter() > deadline:
                raise CannotMeasure(f"llama-server does not come to it: {self._said()[-200:]}")
            time.sleep(LOOK_EVERY_S)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(START_BOUND_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _text(number: int, num_lines: int) -> str:
    return "".join(f"Part {number}-{i} of the machine has {i * 7 % 13} screws.\n" for i in range(num_lines))


def _measure(run: Run) -> list[Row]:
    model = model_file()
    for module in ("aiohttp", "xllamacpp"):
        if importlib.util.find_spec(module) is None:
            raise CannotMeasure("needs aiohttp and a llama-server: pip install 'kvd-daemon[llama-server]' xllamacpp")
    cold_s, warm_s, shared = [], [], []
    with ExitStack() as stack:
        daemon = stack.enter_context(PrivateDaemon(memory_budget=1024 * MIB))
        first, second = (stack.enter_context(Server(daemon.runtime_dir, model)) for _ in range(2))
        for server in (first, second):
            run.step("loading a llama-server")
            server.start()
        for number in range(min(run.rounds, MAX_ROUNDS) + 1):
            run.step("llama-server, cold")
            text = _text(number, NUM_LINES if number else WARM_UP_LINES)
            cold, _ = first.first_token_s(text + "How many parts are there in all? Answer in one word, please.")
            first.await_saves(number + 1)
            run.step("llama-server, from a snapshot")
            warm, timings = second.first_token_s(text + "Which part has most screws? Name it, and nothing else at all.")
            if number:  # the first round warms up
                cold_s.append(cold)
                warm_s.append(warm)
                shared.append(int(timings["cache_n"]))
    if min(shared) < NUM_SHARED:
        raise CannotMeasure(f"only {min(shared)} tokens came from the snapshot")
    value, limit = statistics.median(warm_s) * 1e3, statistics.median(cold_s) * 1e3
    return [TTFT.row(value, limit, ratio=limit / value, note=f"{min(shared):,} tokens from the snapshot")]


GROUP = Group((TTFT,), _measure)
