"""`kvd serve`: what keeps it from starting is one line and an exit code of its own, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.bench.private_daemon import PrivateDaemon


def serve(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvd.cli", "serve", "--runtime-dir", str(folder), *args]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        (["--memory-budget", "0"], 7, "memory.budget must be a size"),
        (["--memory-budget", "900TiB"], 5, "available"),
        (["--access-group", "no-such-group-here"], 7, "no-such-group-here"),
        (["--config", "/nonexistent/kvd.toml"], 7, "/nonexistent/kvd.toml"),
        (["--memory-bugdet", "1GiB"], 2, "--memory-budget"),
    ],
)
def test_a_daemon_that_cannot_start(tmp_path, args, exit_code, words):
    done = serve(tmp_path / "run", *args)
    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_runtime_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").touch()
    done = serve(tmp_path / "run", "--memory-budget", "4MiB")
    assert done.returncode == 8
    assert done.stderr.count("\n") == 1


# case F6
def test_a_second_daemon_on_the_folder(tmp_path):
    with PrivateDaemon(memory_budget="4MiB") as first:
        second = serve(first.runtime_dir, "--memory-budget", "4MiB")
        assert second.returncode == 9
        assert str(first.pid) in second.stderr
        with first.connect() as client:
            assert client.status().pid == first.pid


def test_sigterm_ends_it_well_and_empties_the_folder():
    with PrivateDaemon(memory_budget="4MiB") as daemon:
        os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.wait() == 0
        assert not list(daemon.runtime_dir.iterdir())
