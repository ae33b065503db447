"""`kvd status` and `kvd top` in a real terminal: golden screens at two sizes, after a resize, and in ASCII."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvd_client
from kvd.bench.writer import seal_prompt
from kvd.layout import KVLayout
from tests.support.daemon import Daemon, running_daemon
from tests.support.tmux import Tmux
from tests.support.wait import eventually

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UTF8 = {"LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tiers = {"host": {"budget": 4 << 20}, "redis": {"url": ""}}
    memory = {"budget": 1 << 20, "segment": 256 << 10}
    with (
        running_daemon(tmp_path_factory.mktemp("run"), memory=memory, tiers=tiers) as daemon,
        kvd_client.connect(daemon.folder, label="reader", reserve_ahead_tokens=0) as client,
    ):
        cache = client.cache(model="a-model@1", layout=LAYOUT)
        seal_prompt(cache, list(range(800)), b"\1")
        with cache.sequence(range(325), max_tokens=340):
            yield daemon


def command(daemon: Daemon, name: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "kvd.cli", name, "--runtime-dir", str(daemon.folder), *args]


def steady(screen: str, daemon: Daemon) -> str:
    """The screen without what differs from run to run: pids, uids, times, memory of processes, folders, commands."""
    text = screen.replace(str(daemon.folder), "FOLDER")
    text = re.sub(r"pid \d+  up \d+ (s|min \d\d s)", "pid PID  up TIME", text)
    text = re.sub(r"\d[\d,]* requests/s", "N requests/s", text)
    text = re.sub(r"(?m)^(memory host +\S+ +.*)$", lambda m: re.sub(r" {2,}", "  ", m[1]), text)
    text = re.sub(r"[\d.]+ [KMG]?i?B ready, [\d.]+ [KMG]iB more available", "MEMORY", text)
    text = re.sub(r"gid:\d+", "gid:GID", text)
    # A client's row: its numbers change in width with the pid, so blanks are one.
    row = rf"(?m)^ *{os.getpid()} +\d+ +.*$"
    text = re.sub(row, lambda m: _row(m[0]), text)
    text = re.sub(r"(?m)^ *pid +uid .*$", lambda m: " ".join(m[0].split()), text)
    return re.sub(r"speed: .*", "SPEED", text)


def _row(row: str) -> str:
    words = " ".join(row.split()).replace(str(os.getpid()), "PID", 1)
    words = re.sub(r"^PID \d+ [\d.]+ [KMG]iB", "PID UID MEMORY", words)
    words = re.sub(r"\d+ (s|min \d\d s) reader: .*", "TIME reader", words)
    return re.sub(r"reader: .*", "reader", words)


STATUS = """\
kvd 0.1.0  pid PID  up TIME  FOLDER
memory host  {bar}  256 KiB of 1 MiB in pools
                                       MEMORY
saved  320 tokens

pool  block  segments  in use  cached  free  evicted  tenant
   0  4 KiB         1      21      30    13        0  gid:GID

tier  state         holds  hits  up  down  errors  where
host  up     0 B of 4 MiB   0 %   -     -       0

pool  cached tokens  reused  hits  below  engine  model
   0            800     320  29 %    0 %  raw/1   a-model@1

"""


def test_status_at_80x24(daemon, tmp_path):
    with Tmux(tmp_path, command(daemon, "status"), width=80, height=24, **UTF8) as terminal:
        screen = steady(terminal.shows("exit code 0"), daemon)
    assert screen.startswith(EXPECTED_STATUS), screen
    assert (
        "pid uid memory refs mapped mode saved prefill client\nPID UID MEMORY 21 256 KiB mapped 320 - reader" in screen
    )


def test_status_at_160x50(daemon, tmp_path):
    with Tmux(tmp_path, command(daemon, "status"), width=160, height=50, **UTF8) as terminal:
        screen = steady(terminal.shows("exit code 0"), daemon)
    assert screen.startswith(EXPECTED_STATUS), screen
    assert (
        "pid uid memory refs holds mapped mode saved prefill connected client\n"
        "PID UID MEMORY 21 84 KiB 256 KiB mapped 320 - TIME reader" in screen
    )


def test_status_where_only_ascii_is(daemon, tmp_path):
    with Tmux(tmp_path, command(daemon, "status"), width=80, height=24, **ASCII) as terminal:
        screen = steady(terminal.shows("exit code 0"), daemon)
    assert screen.isascii()
    assert screen.startswith(EXPECTED_STATUS.replace(BAR, "------ -----------------")), screen


def test_watching_follows_a_resize(daemon, tmp_path):
    watch = command(daemon, "status", "--watch", "--interval", "0.1")
    with Tmux(tmp_path, watch, width=80, height=24, **UTF8) as terminal:
        terminal.shows("client", "reader")
        assert "connected" not in terminal.screen()
        terminal.resize(160, 50)
        terminal.shows("connected  client")
        terminal.press("C-c")
        terminal.shows("exit code 0")


TOP = """\
kvd 0.1.0  pid PID  up TIME  N requests/s
memory host {bar} 256 KiB of 1 MiB
"""


@pytest.mark.parametrize(("width", "height", "full", "rest"), [(80, 24, 8, 22), (160, 50, 10, 30)])
@pytest.mark.parametrize("environ", [UTF8, ASCII], ids=["utf8", "ascii"])
def test_top(daemon, tmp_path, width, height, full, rest, environ):
    with Tmux(tmp_path, command(daemon, "top", "--interval", "0.1"), width=width, height=height, **environ) as terminal:
        screen = steady(terminal.shows("requests/s", "reader", "q quit"), daemon)
        assert terminal.has_other_screen()
        assert not terminal.has_cursor()
        lines = screen.splitlines()
        bars = ("#", "-") if environ is ASCII else ("━", "─")
        assert screen.startswith(TOP.format(bar=bars[0] * full + bars[1] * rest)), screen
        assert lines[2].startswith("hits ")
        assert lines[2].endswith(" saved 320 tokens")
        assert lines[3] == "host   up  holds 0 B of 4 MiB  hits 0 %  up 0 B/s  down 0 B/s"
        assert lines[5] == "pool 0 gid:GID  64 blocks of 4 KiB"
        assert sorted(lines[6]) == sorted("u" * 20 + "w" + "c" * 30 + "." * 13)
        assert lines[7] == "u in use  c cached  b copied below  w written  f coming up  . free"
        assert lines[10].startswith("PID UID MEMORY 21 ")
        assert lines[-1].startswith("by holds, 0.1 s  q quit")
        assert len(lines) == height
        assert screen.isascii() is (environ is ASCII)
        terminal.press("q")
        screen = terminal.shows("exit code 0")
        assert "pool 0" not in screen
        assert not terminal.has_other_screen()
        assert terminal.has_cursor()


BAR = "━━━━━━╺━━━━━━━━━━━━━━━━━"
EXPECTED_STATUS = STATUS.format(bar=BAR)


def test_top_follows_a_resize_sorts_and_filters(daemon, tmp_path):
    with Tmux(tmp_path, command(daemon, "top", "--interval", "0.1"), width=80, height=24, **UTF8) as terminal:
        assert "connected" not in terminal.shows("reader")
        terminal.resize(160, 50)
        screen = terminal.shows("connected  client", "+- speed")
        assert screen.splitlines()[-1].startswith("by holds")
        terminal.resize(60, 12)
        terminal.shows("by holds, 0.1 s  q quit  s sort")
        terminal.resize(80, 24)
        terminal.press("s", "r")
        terminal.shows("by saved reversed")
        terminal.press("/", "n", "o", "b", "o", "d", "y", "Enter")
        terminal.shows("only 'nobody'", "no clients that match")
        terminal.press("/", "Escape")
        terminal.shows("reader")
        terminal.press("?")
        terminal.shows("any key goes back")
        terminal.press("Space")
        terminal.lacks("any key goes back")
        terminal.press("C-c")
        terminal.shows("exit code 0")
        assert not terminal.has_other_screen()


def test_top_gives_the_terminal_back_at_ctrl_z_and_at_sigterm(daemon, tmp_path):
    with Tmux(tmp_path, command(daemon, "top"), width=80, height=24, **UTF8) as terminal:
        terminal.shows("reader")
        pid = _child_named(terminal.pid(), "kvd.cli")
        os.kill(pid, signal.SIGTSTP)
        eventually(lambda: not terminal.has_other_screen() and terminal.has_cursor())
        os.kill(pid, signal.SIGCONT)
        terminal.shows("reader")
        eventually(terminal.has_other_screen)
        os.kill(pid, signal.SIGTERM)
        terminal.shows(f"exit code {128 + signal.SIGTERM}")
        assert not terminal.has_other_screen()


def test_top_says_when_the_daemon_is_gone_and_goes_on_when_it_is_back(tmp_path):
    with (
        running_daemon(tmp_path) as daemon,
        Tmux(tmp_path, command(daemon, "top", "--interval", "0.1"), width=80, height=24, **UTF8) as terminal,
    ):
        terminal.shows("no pools")
        daemon.kill()
        terminal.shows("no daemon")
        daemon.start()
        terminal.lacks("no daemon")
        terminal.press("q")
        terminal.shows("exit code 0")


def test_a_frozen_daemon_does_not_keep_top_from_quitting(tmp_path):
    with (
        running_daemon(tmp_path) as daemon,
        Tmux(tmp_path, command(daemon, "top", "--interval", "0.1"), width=80, height=24, **UTF8) as terminal,
    ):
        terminal.shows("no pools")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            terminal.press("q")
            terminal.shows("exit code 0")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_top_without_a_terminal_is_an_error_in_a_line(daemon):
    done = subprocess.run(command(daemon, "top"), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr


def _child_named(pid: int, words: str) -> int:
    """The descendant of a process whose command line has these words."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if (
            words in Path(f"/proc/{one}/cmdline").read_text()
            and "sh\0-c" not in Path(f"/proc/{one}/cmdline").read_text()
        ):
            return one
        waiting += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    raise AssertionError(f"no process with {words!r}")
