"""sd_notify and the watchdog, with the test in systemd's place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from kvd.systemd import Notifier
from tests.support.daemon import ROOT, Daemon
from tests.support.raw_client import RawClient
from tests.support.wait import eventually


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        yield manager


def test_a_daemon_says_ready_alive_and_stopping(manager, tmp_path):
    daemon = Daemon(tmp_path / "run", memory={"budget": 8 << 20, "segment": 1 << 20, "prefault": "lazy"})
    daemon.process = daemon.spawn(NOTIFY_SOCKET=manager.getsockname(), WATCHDOG_USEC="400000")
    assert manager.recv(1000) == f"READY=1\nSTATUS=serving {daemon.folder}".encode()
    assert manager.recv(1000) == b"WATCHDOG=1"
    assert manager.recv(1000) == b"WATCHDOG=1"
    os.kill(daemon.pid, signal.SIGTERM)
    while (said := manager.recv(1000)) == b"WATCHDOG=1":
        pass
    assert said == b"STOPPING=1"
    assert daemon.process.wait(10) == 0


def test_outside_systemd_nothing_is_sent():
    notifier = Notifier({})
    notifier.ready("x")
    notifier.alive()
    notifier.stopping()
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
        eventually(lambda: "log.level is debug" in log.read_text())
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
