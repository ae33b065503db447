"""`kvd status` against a real daemon: for people, for scripts, staying, and where there is none."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvd_client
from kvd.bench.private_daemon import PrivateDaemon
from kvd.cli.app import app
from kvd.layout import KVLayout
from kvd.status import Snapshot

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64)
KVD = [sys.executable, "-m", "kvd.cli"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(memory_budget="8MiB") as daemon:
        yield daemon


def run(daemon: PrivateDaemon, *args: str):
    return CliRunner().invoke(app, ["status", "--runtime-dir", str(daemon.runtime_dir), *args], prog_name="kvd")


def test_the_page_names_this_client_and_its_model(daemon):
    with kvd_client.connect(daemon.runtime_dir, label="writer") as client:
        cache = client.cache(model="a-model@1", layout=LAYOUT)
        with cache.sequence(range(40), max_tokens=64) as seq:
            seq.advance(40)
            seq.commit()
            # From another process: the page leaves out the process that asks.
            page = subprocess.run(
                [*KVD, "status", "--runtime-dir", str(daemon.runtime_dir)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
    assert "a-model@1" in page
    assert f"{os.getpid()}" in page
    assert "writer: " in page
    assert "8 MiB in pools" in page
    assert "kvd status" not in page


def test_json_is_the_snapshot_and_the_processes(daemon):
    status = json.loads(run(daemon, "--json").stdout)
    assert set(Snapshot.__struct_fields__) == set(status)
    (client,) = status["clients"]
    assert client["pid"] == os.getpid()
    assert client["command"]
    assert client["private_nbytes"] > 0


def test_watching_stops_after_the_count(daemon):
    lines = run(daemon, "--watch", "--interval", "0.05", "--count", "3", "--json").stdout.splitlines()
    uptimes = [json.loads(line)["uptime_s"] for line in lines]
    assert len(uptimes) == 3
    assert uptimes == sorted(uptimes)


def test_watching_into_a_pipe_prints_page_after_page(daemon):
    result = run(daemon, "--watch", "--interval", "0.05", "--count", "2")
    assert result.stdout.count("memory host") == 2
    assert "\x1b" not in result.stdout


def test_without_a_daemon_one_line_and_exit_code_3(tmp_path):
    result = CliRunner().invoke(app, ["status", "--runtime-dir", str(tmp_path)], prog_name="kvd")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("kvd: ")
    assert result.stderr.count("\n") == 1
    assert str(tmp_path) in result.stderr


def test_watching_survives_a_daemon_that_is_not_there_yet(daemon, tmp_path):
    link = tmp_path / "later"
    watching = subprocess.Popen(
        [*KVD, "status", "--runtime-dir", str(link), "--watch", "--interval", "0.05", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert watching.stderr.readline().startswith("kvd: ")
        link.symlink_to(daemon.runtime_dir)
        assert json.loads(watching.stdout.readline())["pid"] == daemon.pid
        watching.terminate()
        watching.communicate()


def test_a_terminal_without_utf8_is_no_error(daemon):
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*KVD, "status", "--runtime-dir", str(daemon.runtime_dir)],
        env=environ,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    done.stdout.decode("ascii")


def on_terminal(args: list[str], **environ: str) -> str:
    """What the command writes to a terminal of 80 columns."""
    master, slave = pty.openpty()
    done = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **environ}
    with subprocess.Popen(args, stdin=slave, stdout=slave, stderr=slave, env=done):
        os.close(slave)
        chunks = []
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(master)
    return b"".join(chunks).decode()


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal_unless_it_is_not_wanted(daemon, environ, coloured, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    page = on_terminal([*KVD, "status", "--runtime-dir", str(daemon.runtime_dir)], **environ)
    assert ("\x1b[1;32m" in page) is coloured


def test_interrupting_a_watch_is_no_error(daemon):
    script = Path(__file__).with_name("interrupt_watch.py")
    done = subprocess.run(
        [sys.executable, str(script), str(daemon.runtime_dir)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
