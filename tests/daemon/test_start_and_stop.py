"""One daemon a folder; what a start needs; what a stop, or a crash, leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.protocol.control_page import ControlPageReader, DaemonState
from kvd.protocol.requests import Match
from kvd.protocol.session import Goodbye
from tests.support.daemon import Daemon, running_daemon
from tests.support.raw_client import RawClient, hashes, totals
from tests.support.shared_memory import OWN_SHARED_MEMORY, SharedMemoryOf
from tests.support.stopwatch import Stopwatch
from tests.support.wait import eventually


def refused(daemon: Daemon) -> int:
    """The exit code of a start that fails, with one line in the log."""
    code = daemon.spawn().wait(30)
    lines = [line for line in daemon.log().splitlines() if line.startswith("ERROR")]
    assert len(lines) == 1, daemon.log()
    assert "Traceback" not in daemon.log()
    return code


def test_a_second_daemon_is_refused_and_the_first_unharmed(tmp_path):  # case F6
    with running_daemon(tmp_path) as first, RawClient(first.folder) as raw:
        second = Daemon(first.folder)
        assert refused(second) == 9
        assert f"pid {first.pid}" in second.log()
        assert raw.status().pid == first.pid
        with RawClient(first.folder) as another:
            another.check()


def test_a_killed_daemon_leaves_nothing_that_blocks_the_next(tmp_path):  # case D2
    with running_daemon(tmp_path, prefix=OWN_SHARED_MEMORY) as first, RawClient(first.folder) as raw:
        raw.begin(raw.open_cache(), hashes("a"), num_blocks=100)
        with SharedMemoryOf(first.pid) as shared_memory:
            first.kill()
            assert shared_memory.names() == []
        assert raw.next_datagram() is not None  # a grant
        assert raw.next_datagram() is None  # and the end
    assert (first.folder / "session.sock").exists()
    watch = Stopwatch()
    with running_daemon(tmp_path, prefix=OWN_SHARED_MEMORY) as second, RawClient(second.folder) as raw:
        assert watch.elapsed_s(second.pid) < 5
        assert totals(raw.status()) == (0, 0)
        with SharedMemoryOf(second.pid) as shared_memory:
            assert second.stop() == 0
            assert shared_memory.names() == []


def test_a_stop_tells_every_client_and_leaves_nothing(tmp_path):
    with running_daemon(tmp_path) as daemon:
        with RawClient(daemon.folder) as raw, RawClient(daemon.folder) as other:
            raw.reserve(raw.open_cache(), 10)
            raw.drain()
            assert daemon.stop() == 0
            for client in (raw, other):
                goodbye = client.next_datagram()
                assert isinstance(goodbye, Goodbye)
                assert goodbye.code == "daemon-restarted"
                assert client.next_datagram() is None
            with ControlPageReader(raw.descriptors[0]) as page:
                assert page.read().state is DaemonState.STOPPED
        assert not list(daemon.folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_under_load_is_clean(tmp_path, number):
    with running_daemon(tmp_path) as daemon, RawClient(daemon.folder) as raw:
        cache = raw.open_cache()
        for _ in range(20_000):
            raw.post(Match, cache, hashes("a"))
        os.kill(daemon.pid, number)
        assert daemon.process.wait(10) == 0


def test_sighup_changes_nothing_without_a_file(tmp_path):
    with running_daemon(tmp_path) as daemon, RawClient(daemon.folder) as raw:
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: "SIGHUP" in daemon.log())
        raw.status()


def test_sockets_and_folder_are_for_the_group_only(tmp_path):
    with running_daemon(tmp_path, access={"group": "nogroup"}) as daemon:
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in daemon.folder.iterdir()}
        assert modes == {"session.sock": "0o660", "requests.sock": "0o660", "kvd.lock": "0o640"}
        assert daemon.folder.stat().st_mode & 0o777 == 0o750
        assert {path.group() for path in daemon.folder.glob("*.sock")} == {"nogroup"}
        assert daemon.folder.group() == "nogroup"


def test_without_a_group_only_the_own_user_may_connect(tmp_path):
    with running_daemon(tmp_path) as daemon:
        assert {path.stat().st_mode & 0o777 for path in daemon.folder.glob("*.sock")} == {0o600}
        assert daemon.folder.stat().st_mode & 0o777 == 0o700


def test_an_unknown_group_is_a_configuration_error(tmp_path):
    daemon = Daemon(tmp_path / "run", access={"group": "no such group"})
    assert refused(daemon) == 7
    assert "groupadd" in daemon.log()
    assert not daemon.folder.exists()


def test_a_folder_whose_path_is_too_long_for_a_socket(tmp_path):
    daemon = Daemon(tmp_path / ("x" * 100))
    assert refused(daemon) == 8
    assert "107 bytes" in daemon.log()
    assert not daemon.folder.exists()


def test_a_folder_without_rights(tmp_path):
    """As another user, since root may write anywhere."""
    (folder := tmp_path / "run").mkdir(mode=0o700)
    daemon = Daemon(folder)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *daemon_argv(daemon)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 8, done.stderr
    assert done.stderr.count("\n") == 1
    assert str(folder) in done.stderr


def daemon_argv(daemon: Daemon) -> list[str]:
    return [sys.executable, "-m", "tests.support.serve", json.dumps({"runtime_dir": str(daemon.folder)})]


def test_a_folder_of_another_user_is_not_trusted(tmp_path):
    (folder := tmp_path / "run").mkdir()
    os.chown(folder, 12345, 12345)
    daemon = Daemon(folder)
    assert refused(daemon) == 8
    assert "12345" in daemon.log()
    assert not list(folder.iterdir())


def test_a_folder_that_everybody_may_write_is_not_trusted(tmp_path):
    (folder := tmp_path / "run").mkdir()
    folder.chmod(0o777)
    daemon = Daemon(folder)
    assert refused(daemon) == 8
    assert "chmod" in daemon.log()


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").touch()
    assert refused(Daemon(tmp_path / "run")) == 8


@pytest.fixture
def tiny_disk(tmp_path):
    (disk := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=10,mode=0700", "none", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("how", ["bytes", "inodes"])
def test_a_folder_on_a_full_disk(tiny_disk, tmp_path, how):
    folder = tiny_disk / "run"
    folder.mkdir(mode=0o700)
    for index in range(100):
        try:
            (tiny_disk / f"filler{index}").write_bytes(bytes(4096) if how == "bytes" else b"")
        except OSError:
            break
    else:
        raise AssertionError("the disk never filled")
    daemon = Daemon(folder)
    daemon._log = tmp_path / "log"
    assert refused(daemon) == 8
    assert "full" in daemon.log()
    assert not list(folder.iterdir())


def test_a_budget_larger_than_memory(tmp_path):
    daemon = Daemon(tmp_path / "run", memory={"budget": 1 << 45, "segment": 1 << 20})
    assert refused(daemon) == 5
    assert not list(daemon.folder.iterdir())


def test_a_stale_socket_of_a_dead_daemon_is_replaced(tmp_path):  # case D2
    (folder := tmp_path / "run").mkdir(mode=0o700)
    for name in ("session.sock", "requests.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(folder / name))
    with running_daemon(tmp_path) as daemon, RawClient(daemon.folder) as raw:
        raw.check()


def test_ready_long_before_a_large_budget_is_filled(tmp_path):
    watch = Stopwatch()
    with running_daemon(tmp_path, budget="4GiB", segment="64MiB", prefault="background") as daemon:
        assert watch.elapsed_s(daemon.pid) < 2.0
        with RawClient(daemon.folder) as raw:
            assert raw.status().memory.ready_nbytes < 4 << 30
