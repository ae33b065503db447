"""Client processes of a test: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class ClientProcess:
    """A `tests.support.raw_client.Puppet` in a process of its own, or that of another module."""

    def __init__(self, folder: Path, prefix: Sequence[str] = (), module: str = "tests.support.raw_client") -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Of the process that was started; `prefix` may be another than the client."""
        return self.process.pid

    def start(self, todo: dict[str, object]) -> None:
        """Has it begun, and waits for nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(todo) + "\n")
        self.process.stdin.flush()

    def tell(self, todo: dict[str, object]) -> dict[str, int]:
        """Has it done, and returns the pids of "done" and, after a fork, of "child" (as the client sees them)."""
        self.start(todo)
        assert self.process.stdout is not None
        said: dict[str, int] = {}
        while not {"done", *(["child"] if "fork" in todo else [])} <= set(said):
            word, _, pid = self.process.stdout.readline().partition(" ")
            assert word, f"the client ended while it did {todo}"
            said[word] = int(pid)
        return said

    def kill(self) -> None:
        """SIGKILL to the process that was started."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it, and lets a child of it that waits on the same stdin go."""
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def client_process(
    folder: Path, *, prefix: Sequence[str] = (), module: str = "tests.support.raw_client", **todo: object
) -> Iterator[ClientProcess]:
    """A client that has done `todo` (see `Puppet`, and that of the module) and waits for more."""
    client = ClientProcess(folder, prefix, module)
    try:
        client.tell(todo)
        yield client
    finally:
        client.close()
