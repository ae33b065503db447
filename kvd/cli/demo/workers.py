"""The demo's processes seen from outside: starting them, their cues, their events as they come, their end."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import click
import msgspec

from kvd.cli.demo.daemon import STOP_TIMEOUT_S, clean_environ, last_line, stop
from kvd.cli.demo.events import Event, decode

E = TypeVar("E")

TIMEOUT_S = 300.0
"""For one step of one worker; minutes, since a first load may read a cold disk."""


_ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Threads of two processes that spin for each other on the same cores make both many times slower; a short spin
    # costs a process that is alone nothing. For libgomp, which torch's builds for Linux bring along.
    "GOMP_SPINCOUNT": "2000",
}


class WorkerFailed(click.ClickException):
    """A process of the demo ended, or fell silent, before its part was played. Ends the command."""


class Worker:
    """One process. A context manager; at the end it is told to stop, and stopped if it does not."""

    def __init__(
        self, *, name: str, runtime_dir: Path, log: Path, document: str, question: str, unpacked: Path
    ) -> None:
        """`unpacked` is where the model is, or where the first worker puts it."""
        self.name = name
        self.question = question
        self._log = log
        self._pending: list[Event] = []
        self._partial = b""
        environ = clean_environ() | _ENVIRON
        arguments = [str(runtime_dir), document, question, name, str(unpacked)]
        command = [sys.executable, "-m", "kvd.cli.demo.worker", *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environ
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise WorkerFailed(f"{name} has no pipes")
        self._cues, self._events = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there are events, or the end of them."""
        return self._events.fileno()

    def cue(self, word: str) -> None:
        """Sends the next cue. Raises `WorkerFailed` when nobody is there."""
        try:
            self._cues.write(f"{word}\n".encode())
            self._cues.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error

    def read(self) -> None:
        """Takes in what it has said; called when `fileno` is readable. Raises `WorkerFailed` when it ended."""
        chunk = os.read(self.fileno(), 1 << 16)
        if not chunk:
            raise self._failure(f"ended with exit code {self._process.wait()}")
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        try:
            self._pending += map(decode, lines)
        except msgspec.DecodeError as error:
            raise self._failure("said what is no event") from error

    def take(self) -> list[Event]:
        """Events that came since the last call, in order."""
        taken, self._pending = self._pending, []
        return taken

    def _failure(self, what: str) -> WorkerFailed:
        return WorkerFailed(f"{self.name} {what}: {last_line(self._log) or 'it said nothing'}")

    def silence(self) -> WorkerFailed:
        """The error for a worker that took too long."""
        return self._failure("did not answer in time")

    def close(self) -> None:
        """Lets it end by itself, then ends it. Idempotent."""
        # A cue that is still buffered may find nobody.
        with contextlib.suppress(BrokenPipeError):
            self._cues.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            stop(self._process)
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            stop(self._process)
        self.close()


def await_all(
    workers: list[Worker], kind: type[E], seen: Callable[[Worker, Event], None], timeout_s: float = TIMEOUT_S
) -> list[E]:
    """The first event of `kind` of each worker, in the order of `workers`; every event is shown to `seen` as it comes.

    Raises `WorkerFailed` when one ends first, or none says anything for `timeout_s`.
    """
    found: dict[str, E] = {}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker, selectors.EVENT_READ, worker)
        while len(found) < len(workers):
            started_s = time.monotonic()
            ready = selector.select(timeout_s)
            if not ready and time.monotonic() - started_s >= timeout_s:
                raise next(worker for worker in workers if worker.name not in found).silence()
            for key, _ in ready:
                worker = key.data
                worker.read()
                for event in worker.take():
                    seen(worker, event)
                    if isinstance(event, kind):
                        found[worker.name] = event
                        selector.unregister(worker)
    return [found[worker.name] for worker in workers]
