"""A real daemon as a subprocess in a folder of the test's own.

with running_daemon(tmp_path, budget="8MiB", segment="1MiB") as daemon:
    kvd_client.connect(daemon.folder)

Pools are in host memory, or with `machine=FakeMachine(...)` on the first card of that machine; a module whose tests are
to run on both says `pytestmark = pytest.mark.usefixtures("either_home")` (tests/daemon/conftest.py), and nothing more.

It is ready when the block begins: the test plays systemd and waits for READY=1. At the end it is stopped with SIGTERM
and must exit with 0, leaving no socket and no lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvd.config.sizes import parse_size
from tests.fakecuda.machine import FakeMachine

default_machine: FakeMachine | None = None
"""Where `running_daemon` has pools when a test names no machine; set by fixtures."""

ROOT = Path(__file__).parents[2]
START_BOUND_S = 100.0
STOP_BOUND_S = 60.0


class Daemon:
    """One daemon process. `start()` waits until it is ready; `log()` is what it wrote."""

    def __init__(
        self, folder: Path, *, environ: Mapping[str, str] | None = None, prefix: Sequence[str] = (), **config: Any
    ) -> None:
        """`config`: sections of `kvd.config.schema.Config` as dicts. No tier below the pools unless it names one.

        `environ` is added to the process's environment; `prefix` are the words of a command that becomes the daemon.
        """
        self.folder = folder
        self._environ = dict(environ or {})
        self._prefix = prefix
        self._config = {"runtime_dir": str(folder), "tiers": {"redis": {"url": ""}}, **config}
        self._log = folder.parent / f"{folder.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def spawn(self, **environ: str) -> subprocess.Popen[bytes]:
        """Starts the process and waits for nothing."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "tests.support.serve", json.dumps(self._config)],
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
                | self._environ
                | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start(self) -> Daemon:
        """Starts it and returns when it says READY=1; fails with its log when it ends instead."""
        # An abstract address: no path to be too long, nothing to remove.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            name = f"@kvd-test-{os.getpid()}-{id(self):x}"
            manager.bind("\0" + name[1:])
            self.process = self.spawn(NOTIFY_SOCKET=name)
            pidfd = os.pidfd_open(self.process.pid)
            try:
                while True:
                    ready, _, _ = select.select([manager, pidfd], [], [], START_BOUND_S)
                    if manager in ready and manager.recv(1024).startswith(b"READY=1"):
                        return self
                    if pidfd in ready or not ready:
                        self.kill()
                        raise AssertionError(f"the daemon did not become ready:\n{self.log()}")
            finally:
                os.close(pidfd)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(STOP_BOUND_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"SIGTERM did not stop the daemon:\n{self.log()}") from None

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def num_descriptors(self) -> int:
        return len(descriptors_of(self.pid))

    def anonymous_nbytes(self) -> int:
        """RssAnon of proc_pid_status(5)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def descriptors_of(pid: int) -> list[str]:
    """What each descriptor of a process is open on; what it reads of /proc and /sys is open for a moment only."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(entry.readlink()))
    return [one for one in found if not one.startswith(("/proc/", "/sys/"))]


@contextlib.contextmanager
def running_daemon(
    where: Path,
    *,
    budget: str | int = "64MiB",
    segment: str | int = "1MiB",
    prefault: str = "lazy",
    name: str = "run",
    machine: FakeMachine | None = None,
    environ: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **sections: Any,
) -> Iterator[Daemon]:
    """A ready daemon in `where / name`, stopped cleanly at the end (unless the test killed it)."""
    machine = machine or default_machine
    memory = {
        "budget": parse_size(budget) if isinstance(budget, str) else budget,
        "segment": parse_size(segment) if isinstance(segment, str) else segment,
        "prefault": prefault,
        "device": "cpu" if machine is None else "cuda:0",
        # The cards of a fake machine are small.
        "reserve_nbytes": 0,
        # Of the usual size it would take more descriptors than there are, in segments as small as these.
        **({} if machine is None else {"host": {"budget": 64 << 20}}),
        **sections.pop("memory", {}),
    }
    daemon = Daemon(
        where / name,
        environ={**({} if machine is None else machine.environ), **(environ or {})},
        prefix=prefix,
        memory=memory,
        **sections,
    )
    daemon.start()
    try:
        yield daemon
    except BaseException:
        if daemon.is_alive:
            daemon.kill()
        print(daemon.log(), file=sys.stderr)
        raise
    if daemon.process is not None and daemon.process.returncode is None:
        code = daemon.stop()
        assert code == 0, f"exit code {code}:\n{daemon.log()}"
        assert not list(daemon.folder.iterdir()), "a clean stop leaves nothing behind"
