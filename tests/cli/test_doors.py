"""Where a command meets the system first: closed folders, unreadable files, full disks, a daemon that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvd_client
import kvd_client.aio
from kvd.bench.private_daemon import PrivateDaemon
from kvd.cli import config, flush, spill, status
from kvd.cli.app import app
from kvd.errors import InvalidRequest, PermissionRefused
from tests.support.unprivileged import as_nobody

KVD = [sys.executable, "-m", "kvd.cli"]
COMMANDS_LOADED = (config, flush, spill, status)
"""Imported for the children that run them as another user."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="kvd-doors-") as name:
        (place := Path(name)).chmod(0o755)
        yield place


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(memory_budget="4MiB") as daemon:
        yield daemon


def ends(exit_code: int, *args: str, words: str = "", environ: dict[str, str] | None = None) -> bool:
    """Whether the command ends so, with one line that holds the words."""
    result = CliRunner().invoke(app, args, prog_name="kvd", env=environ)
    print(result.exit_code, result.output, file=sys.stderr)
    return (
        result.exit_code == exit_code and words in result.stderr and (exit_code == 2 or result.stderr.count("\n") == 1)
    )


def test_a_folder_that_may_not_be_entered_is_exit_code_4(place):
    (hidden := place / "kvd").mkdir(mode=0)
    environ = {"KVD_RUNTIME_DIR": "", "RUNTIME_DIRECTORY": "", "XDG_RUNTIME_DIR": str(place)}
    assert as_nobody(lambda: ends(4, "status", "--runtime-dir", str(hidden), words=str(hidden)))
    assert as_nobody(lambda: ends(4, "status", words=str(hidden), environ=environ))


def test_connecting_to_a_folder_that_may_not_be_entered_says_so(place):
    (hidden := place / "kvd").mkdir(mode=0)

    def refused() -> bool:
        with pytest.raises(PermissionRefused):
            kvd_client.connect(hidden)
        return True

    assert as_nobody(refused)


def test_an_unreadable_configuration_file_is_exit_code_7(place):
    (path := place / "kvd.toml").touch(mode=0o600)
    assert as_nobody(lambda: ends(7, "config", "show", "--config", str(path), words="Permission denied"))


@pytest.mark.parametrize("args", [("status",), ("spill",), ("config", "check")])
def test_an_empty_runtime_folder_is_a_wrong_configuration(args):
    assert ends(7, *args, "--runtime-dir", "", words="runtime_dir")


def test_check_knows_the_groups():
    assert ends(7, "config", "check", "--access-group", "no-such-group-here", words="no-such-group-here")


@pytest.mark.parametrize("command", [("config", "show"), ("config", "check"), ("serve",)])
def test_an_empty_name_of_the_configuration_file_is_a_wrong_configuration(command):
    assert ends(7, *command, "--config", "", words="--config")


@pytest.mark.parametrize("url", ["embedded", "off", "redis://host"])
def test_check_reads_the_password_file_whatever_the_url(place, url):
    (path := place / "secret").touch(mode=0o600)
    args = ("config", "check", "--tiers-redis-url", url, "--tiers-redis-password-file")
    assert as_nobody(lambda: ends(7, *args, str(path), words="Permission denied"))
    assert ends(7, *args, str(place / "none"), words=str(place / "none"))
    assert ends(7, *args, str(place), words="Is a directory")
    assert CliRunner().invoke(app, [*args, str(path)], prog_name="kvd").exit_code == 0


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--model", ""], "--model"),
        (["--model", " "], "--model"),
        (["--namespace", ""], "--namespace"),
        (["--all", "--tier", ""], "--tier"),
    ],
)
def test_an_empty_option_of_flush_is_a_usage_error(daemon, args, option):
    assert ends(2, "flush", "--runtime-dir", str(daemon.runtime_dir), *args, words=f"{option} is empty")


@pytest.mark.parametrize("empty", [{"model": ""}, {"namespace": b""}, {"tier": ""}])
async def test_an_empty_argument_of_flush_is_refused_by_the_library(daemon, empty):
    with kvd_client.connect(daemon.runtime_dir) as client, pytest.raises(InvalidRequest, match="is empty"):
        client.flush(**empty)
    async with kvd_client.aio.connect(daemon.runtime_dir) as client:
        with pytest.raises(InvalidRequest, match="is empty"):
            await client.flush(**empty)
        assert (await client.flush()).num_blocks == 0


def test_a_daemon_that_hangs_is_told_of_soon(daemon):
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert ends(6, "status", "--runtime-dir", str(daemon.runtime_dir), words="did not greet")
        assert time.monotonic() - began < 2 * status.TIMEOUT_S
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@pytest.mark.parametrize("args", [["status"], ["status", "--json"], ["config", "show"], ["--help"]])
def test_output_to_a_full_disk_is_one_line(daemon, args):
    environ = os.environ | {"KVD_RUNTIME_DIR": str(daemon.runtime_dir)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KVD, *args], env=environ, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "kvd: cannot write the output: No space left on device\n"
