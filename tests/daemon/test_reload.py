"""What SIGHUP changes, what it postpones, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.daemon.reload import RELOADABLE
from kvd.protocol.replies import Failed, Reserved
from kvd.protocol.requests import Reserve
from kvd.protocol.session import Refused
from tests.support.daemon import ROOT
from tests.support.raw_client import RawClient

HEAD = '[tiers.redis]\nurl = ""\n[memory]\nprefault = "lazy"\nsegment = "1MiB"\n'


class Served:
    """`kvd serve` over a file that the test rewrites."""

    def __init__(self, where: Path) -> None:
        self.folder, self._file, self._log = where / "run", where / "kvd.toml", where / "log"
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(where / "notify"))
        self._manager.settimeout(30)
        self._write('budget = "8MiB"\n')
        argv = [sys.executable, "-m", "kvd.cli", "serve", "--config", str(self._file), "--runtime-dir"]
        with self._log.open("wb") as log:
            environ = os.environ | {"NOTIFY_SOCKET": self._manager.getsockname()}
            self.process = subprocess.Popen([*argv, str(self.folder)], env=environ, stderr=log, cwd=ROOT)
        assert self._manager.recv(1000).startswith(b"READY=1")

    def _write(self, more: str) -> None:
        self._file.write_text(HEAD + more)

    def log(self) -> str:
        return self._log.read_text()

    def reload(self, more: str) -> str:
        """The lines that the reload wrote to the log. At the end it is told to systemd, so the test plays it."""
        before = len(self.log())
        self._write(more)
        os.kill(self.process.pid, signal.SIGHUP)
        while not self._manager.recv(1000).startswith(b"READY=1"):
            pass
        return self.log()[before:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._manager.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
        served.process.terminate()
        assert served.process.wait(20) == 0, served.log()
    finally:
        served.close()


def test_limits_take_effect_at_once(served):  # case F4
    with RawClient(served.folder) as raw:
        cache = raw.open_cache()
        assert isinstance(raw.ask(Reserve, cache, 100), Reserved)
        said = served.reload('budget = "8MiB"\n[limits]\nsession_nbytes = "512KiB"\nuid_sessions = 1\n')
        assert "limits.session_nbytes is 512KiB" in said
        refused = raw.ask(Reserve, cache, 100)
        assert isinstance(refused, Failed)
        assert refused.code == "quota-exceeded"
        with RawClient(served.folder) as second:
            assert isinstance(second.answer, Refused)
        assert "limits.session_nbytes is 0" in served.reload('budget = "8MiB"\n')
        assert isinstance(raw.ask(Reserve, cache, 100), Reserved)


def test_what_needs_a_restart_is_named_every_time_and_changes_nothing(served):  # case F4
    for _ in range(2):
        said = served.reload('budget = "16MiB"\n')
        assert "WARNING SIGHUP: memory.budget changed too, and take effect at the next start" in said
    with RawClient(served.folder) as raw:
        assert raw.status().memory.budget_nbytes == 8 << 20


def test_a_wrong_file_changes_nothing(served):  # case F4
    said = served.reload('budget = "8MiB"\n[limits]\nuid_sessions = 1\nsession_nbytes = "lots"\n')
    assert "WARNING SIGHUP: the configuration was not taken over" in said
    with RawClient(served.folder), RawClient(served.folder) as second:
        second.status()


def test_every_key_that_can_be_reloaded_is_in_the_readme():
    page = (ROOT / "README.md").read_text()
    assert [name for name in sorted(RELOADABLE) if f"`{name}`" not in page] == []
