"""Two daemons in one folder, after somebody removed the first one's lock."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvd.daemon.folder import LOCK_FILE, locked_folder
from kvd.daemon.presence import LOOK_EVERY_S, FolderWatch
from tests.support.daemon import Daemon, running_daemon
from tests.support.raw_client import RawClient
from tests.support.wait import eventually


def test_a_stop_removes_nothing_of_a_daemon_that_took_the_folder_over(tmp_path: Path):
    first = Daemon(tmp_path / "run", memory={"budget": 16 << 20, "segment": 1 << 20}).start()
    try:
        (first.folder / LOCK_FILE).unlink()
        with running_daemon(tmp_path) as second:
            eventually(lambda: "removed or replaced" in first.log(), 2 * LOOK_EVERY_S)
            assert first.stop() == 0
            assert {path.name for path in second.folder.iterdir()} == {LOCK_FILE, "session.sock", "requests.sock"}
            with RawClient(second.folder) as raw:
                assert raw.status().pid == second.pid
    finally:
        if first.is_alive:
            first.kill()
    assert first.log().count("ERROR") == 1


def test_only_the_own_lock_is_removed(tmp_path: Path):
    with locked_folder(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        with locked_folder(tmp_path):
            pass
        assert not list(tmp_path.iterdir())
        (tmp_path / LOCK_FILE).write_text("another's")
    assert (tmp_path / LOCK_FILE).read_text() == "another's"


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_lost_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str):
    now_s = 0.0
    watch = FolderWatch(clock=lambda: now_s)
    kept, lost = tmp_path / "kept", tmp_path / "lost"
    kept.touch()
    lost.touch()

    def looked() -> list[str]:
        nonlocal now_s
        now_s += LOOK_EVERY_S
        watch.look()
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    watch.begin([kept, lost])
    assert looked() == []
    if how == "removed":
        lost.unlink()
    else:
        (tmp_path / "new").touch()
        (tmp_path / "new").replace(lost)
    watch.look()
    assert not caplog.records
    (line,) = looked()
    assert line.startswith(f"{lost}: removed or replaced")
    assert looked() == [line]


def test_a_stop_that_removes_the_files_is_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    watch = FolderWatch(clock=lambda: 0.0)
    watch.begin([tmp_path / "lock"])
    (tmp_path / "lock").touch()
    watch.end()
    watch.look()
    assert not caplog.records
