"""A daemon of the demo's own: in a folder of its own, with built-in settings, gone at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kvd_client
from kvd.errors import ConnectionFailed, DaemonUnavailable, RequestTimeout

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 60.0
"""Copying everything down and writing it to disk, on a slow one."""
_POLL_S = 0.02


class PrivateDaemon:
    """A running daemon. `folder` is the demo's, `runtime_dir` its own within it. `process` changes at a restart."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        """Starts it. Raises `DaemonUnavailable` with its own last line when it does not come up."""
        self.folder = folder
        self.runtime_dir = folder / "run"
        self._log = folder / "daemon.log"
        (config := folder / "kvd.toml").touch()
        self._command = [sys.executable, "-m", "kvd.cli", "serve", "--config", str(config)]
        self._command += ["--runtime-dir", str(self.runtime_dir), *options]
        self.process = self._spawn()

    def restart(self) -> None:
        """Stops it cleanly, waiting as long as that takes, and starts it anew. Raises as the constructor."""
        self.process.terminate()
        try:
            code = self.process.wait(DRAIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            stop(self.process)
            raise DaemonUnavailable("the demo's daemon did not stop in time") from None
        if code:
            raise DaemonUnavailable(f"the demo's daemon ended with exit code {code}: {last_line(self._log)}")
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean_environ()
            )
        try:
            _await_ready(process, self.runtime_dir, self._log)
        except BaseException:
            stop(process)
            raise
        return process


@contextmanager
def private_daemon(*options: str) -> Iterator[PrivateDaemon]:
    """Starts a daemon that no environment or file of the user configures; stops it and removes its folder at the end.

    `options` go to `kvd serve`; "{folder}" in them is the demo's folder.
    Raises `DaemonUnavailable` with the daemon's own last line when it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-demo-") as name:
        daemon = PrivateDaemon(Path(name), [option.replace("{folder}", name) for option in options])
        try:
            yield daemon
        finally:
            stop(daemon.process)


def clean_environ() -> dict[str, str]:
    """The environment without what would point a daemon or a client elsewhere."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVD_") and name not in {"RUNTIME_DIRECTORY", "NOTIFY_SOCKET"}
    }


def _await_ready(process: subprocess.Popen[bytes], runtime_dir: Path, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _answers(runtime_dir):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise DaemonUnavailable(f"the demo's daemon did not start: {last_line(log) or 'it said nothing'}")
        time.sleep(_POLL_S)


def _answers(runtime_dir: Path) -> bool:
    try:
        kvd_client.connect(runtime_dir, label="kvd demo").close()
    except (ConnectionFailed, RequestTimeout):
        return False
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process: asked first, then killed. Idempotent."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says something; empty without any."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
