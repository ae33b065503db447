"""A daemon of the bench's own: a subprocess in a temporary folder, stopped at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import kvd_client
from kvd.bench.row import CannotMeasure
from kvd.config.paths import DAEMON_MARK
from kvd.errors import ConnectionFailed
from kvd.polling import readable
from kvd.status import TierStatus

START_BOUND_S = 60.0
STOP_BOUND_S = 20.0
LOOK_EVERY_S = 0.002


class PrivateDaemon:
    """`kvd serve` with the given flags; a context manager whose `start_s` is the time from spawn to its first answer.

    Without `tiers` there is nothing below its pools, so that a row about memory measures memory alone. The caller's
    KVD_* environment and configuration files don't reach it. Raises `CannotMeasure` with the daemon's own last line
    when it does not come up.
    """

    def __init__(self, *, tiers: bool = False, **flags: str | int) -> None:
        if not tiers:
            flags = {"tiers_redis_url": "off", **flags}
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        self.runtime_dir = Path(self._folder.name) / "run"
        self._log_path = Path(self._folder.name) / "log"
        (config := Path(self._folder.name) / "empty.toml").touch()
        argv = [
            sys.executable,
            "-m",
            "kvd.cli",
            "serve",
            "--config",
            str(config),
            "--runtime-dir",
            str(self.runtime_dir),
        ]
        for name, value in flags.items():
            argv += ["--" + name.replace("_", "-"), str(value)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("KVD_", "NOTIFY_"))}
        start = time.perf_counter()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait(start + START_BOUND_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - start

    @property
    def pid(self) -> int:
        """Of the daemon."""
        return self._process.pid

    def connect(self) -> kvd_client.Client:
        """A session with it."""
        return kvd_client.connect(self.runtime_dir, label="kvd bench")

    def await_tiers(self, client: kvd_client.Client) -> TierStatus:
        """The lowest tier, once all of them are up. Raises `CannotMeasure` when there is none, or it does not come."""
        deadline = time.perf_counter() + START_BOUND_S
        while True:
            snapshot = client.status()
            if not snapshot.tiers:
                raise CannotMeasure(f"there is no tier below the pools: {' '.join(snapshot.warnings)}")
            if all(tier.state == "up" and tier.details.get("embedded", "up") == "up" for tier in snapshot.tiers):
                return snapshot.tiers[-1]
            if time.perf_counter() > deadline:
                raise CannotMeasure(f"a tier does not come up: {' '.join(snapshot.warnings)}")
            time.sleep(LOOK_EVERY_S)

    def anonymous_nbytes(self) -> int:
        """Its resident anonymous memory: RssAnon of proc_pid_status(5)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise CannotMeasure("this kernel does not tell RssAnon")

    def _wait(self, deadline: float) -> None:
        pidfd = os.pidfd_open(self.pid)
        try:
            while not self._answers():
                ended = bool(readable(pidfd, bound_s=LOOK_EVERY_S))
                if ended or time.perf_counter() > deadline:
                    raise CannotMeasure(f"the daemon did not start: {self._last_line()}")
        finally:
            os.close(pidfd)

    def _answers(self) -> bool:
        if not (self.runtime_dir / DAEMON_MARK).exists():
            return False
        try:
            with self.connect() as client:
                client.status()
        except ConnectionFailed:
            return False
        return True

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")

    def wait(self) -> int:
        """Its exit code, once it has ended. Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(STOP_BOUND_S)

    def close(self) -> None:
        """Stops it and removes its folder; idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_BOUND_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
