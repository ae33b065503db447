"""sd_notify and the watchdog, with the test in systemd's place."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvd.daemon.manager import ManagerReports
from kvd.systemd import Notifier
from tests.support.clock import FakeClock
from tests.support.daemon import ROOT, Daemon
from tests.support.raw_client import RawClient
from tests.support.wait import eventually


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        yield manager


def said_within(manager: socket.socket, silence_s: float) -> list[bytes]:
    """What comes until nothing has come for so long."""
    said = []
    while select.select([manager], [], [], silence_s)[0]:
        said.append(manager.recv(1000))
    return said


def test_a_daemon_says_ready_alive_and_stopping(manager, tmp_path):
    daemon = Daemon(tmp_path / "run", memory={"budget": 8 << 20, "segment": 1 << 20, "prefault": "lazy"})
    daemon.process = daemon.spawn(NOTIFY_SOCKET=manager.getsockname(), WATCHDOG_USEC="400000")
    assert manager.recv(1000) == f"READY=1\nSTATUS=serving {daemon.folder}: 0 sessions, 0 of 8 MiB in pools".encode()
    assert manager.recv(1000) == b"WATCHDOG=1"
    assert manager.recv(1000) == b"WATCHDOG=1"
    os.kill(daemon.pid, signal.SIGTERM)
    while (said := manager.recv(1000)) == b"WATCHDOG=1":
        pass
    assert said.startswith(b"STOPPING=1\nSTATUS=stopping")
    assert daemon.process.wait(10) == 0


def test_a_loop_that_hangs_falls_silent_and_says_where_when_it_is_aborted(manager, tmp_path):  # case F5
    """Only the loop feeds the watchdog: threads that still run do not count."""
    memory = {"budget": 8 << 20, "segment": 1 << 20, "prefault": "background"}
    config = json.dumps({"runtime_dir": str(tmp_path / "run"), "memory": memory, "tiers": {"redis": {"url": ""}}})
    argv = [sys.executable, "-m", "tests.support.hanging_daemon", config]
    environ = os.environ | {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert manager.recv(1000).startswith(b"READY=1")
        assert set(said_within(manager, 1.0)) <= {b"WATCHDOG=1"}
        process.send_signal(signal.SIGABRT)
        _, log = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGABRT
    assert "in hang_at_the_second_turn" in log


def test_a_status_is_one_line_and_said_once(manager):
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.status("up\nREADY=1")
    notifier.status("up\nREADY=1")
    notifier.status("down")
    assert [manager.recv(1000), manager.recv(1000)] == [b"STATUS=up READY=1", b"STATUS=down"]


def test_the_status_line_follows_the_service(manager):
    clock = FakeClock()
    reports = ManagerReports(Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "8000000"}), clock)
    lines = iter(["one", "two"])
    for _ in range(9):
        reports.beat(lambda: next(lines))
        clock.now_s += 1.0
    assert said_within(manager, 0) == [b"WATCHDOG=1", b"STATUS=one", b"WATCHDOG=1", b"STATUS=two", b"WATCHDOG=1"]


def test_outside_systemd_nothing_is_sent():
    notifier = Notifier({})
    notifier.ready("x")
    notifier.alive()
    notifier.status("x")
    notifier.reloading()
    notifier.stopping("x")
    assert notifier.watchdog_interval_s is None


def test_a_manager_that_is_gone_harms_nobody(tmp_path):
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("x")


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_of_another_process_is_not_ours(environ, interval_s):
    assert Notifier(environ).watchdog_interval_s == interval_s


def test_sighup_reads_the_file_again(manager, tmp_path):  # case F4
    config, log = tmp_path / "kvd.toml", tmp_path / "log"
    config.write_text('[memory]\nbudget = "8MiB"\nprefault = "lazy"\n')
    argv = [sys.executable, "-m", "kvd.cli", "serve", "--config", str(config), "--runtime-dir", str(tmp_path / "run")]
    with log.open("wb") as stderr:
        environ = os.environ | {"NOTIFY_SOCKET": manager.getsockname()}
        process = subprocess.Popen(argv, env=environ, stderr=stderr, cwd=ROOT)
    try:
        assert manager.recv(1000).startswith(b"READY=1")
        config.write_text('[memory]\nbudget = "8MiB"\nprefault = "lazy"\n[log]\nlevel = "debug"\n')
        process.send_signal(signal.SIGHUP)
        kind, when = manager.recv(1000).decode().splitlines()
        assert kind == "RELOADING=1"
        assert 0 <= time.monotonic() - int(when.removeprefix("MONOTONIC_USEC=")) / 1e6 < 60
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=serving")
        assert "log.level is debug" in log.read_text()
        RawClient(tmp_path / "run").close()
        eventually(lambda: "DEBUG session 1 ended" in log.read_text())
        config.write_text("[memory]\nbudgte = 1\n")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "the configuration was not taken over" in log.read_text())
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
