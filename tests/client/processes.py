"""The other clients of a test, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """For a process that imports this checkout."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients'}"}


class Worker:
    """Another client process; see `tests.client.worker`. A call that waits can be begun here and finished later."""

    def __init__(self, runtime_dir: Path, *, prefix: Sequence[str] = (), **environ: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.client.worker", str(runtime_dir)],
            env=environment() | environ,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "connected"

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def read(self, timeout_s: float = 100) -> Any:
        """The answer, or what the worker says in between. An exception there is its class name and text."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(timeout_s, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, "the worker has ended"
        return json.loads(line)

    def call(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.read()

    def kill(self) -> None:
        """SIGKILL, and it is gone when this returns."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """SIGSTOP: alive, and doing nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def run_python(code: str, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
