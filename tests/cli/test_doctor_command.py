"""`kvd doctor` on this machine, against real daemons, a fake card, and folders that stand for other machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvd_client
from kvd.bench.writer import seal_prompt
from kvd.cli.app import app
from kvd.cli.doctor_gather import gather, kernel, login
from kvd.layout import KVLayout
from tests.fakecuda.machine import P40, FakeMachine
from tests.support.daemon import Daemon, running_daemon

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64)


def doctor(folder: Path, *args: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--runtime-dir", str(folder), *args], prog_name="kvd")


def found(folder: Path, *args: str) -> dict[str, list[dict[str, str]]]:
    by_check: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(doctor(folder, "--json", *args).stdout):
        by_check.setdefault(one["check"], []).append(one)
    return by_check


def test_without_a_daemon_it_says_how_to_start_one(tmp_path):
    result = doctor(tmp_path)
    assert result.exit_code == 13
    assert "error  daemon: no daemon listens" in result.stdout
    assert "kvd serve" in result.stdout


def test_a_running_daemon_is_checked(tmp_path):
    with running_daemon(tmp_path) as daemon:
        by_check = found(daemon.folder)
        assert by_check["daemon"][0]["level"] == "ok"
        assert str(daemon.pid) in by_check["daemon"][0]["text"]
        assert by_check["integrity"] == [
            {"check": "integrity", "level": "ok", "fix": "",
             "text": "free, reserved and sealed blocks and all references add up"}
        ]  # fmt: skip
        assert "no tier below" in by_check["redis"][0]["text"]


def spoil(daemon: Daemon) -> None:
    """Another process writes into the sealed blocks, through its own writable mapping of the memory."""
    script = (
        "import mmap, os, sys\n"
        "for fd in os.listdir(f'/proc/{sys.argv[1]}/fd'):\n"
        "    path = f'/proc/{sys.argv[1]}/fd/{fd}'\n"
        "    if 'memfd' in os.readlink(path) and os.stat(path).st_size >= 1 << 20:\n"
        "        with mmap.mmap(os.open(path, os.O_RDWR), 4096) as view: view[100] ^= 1\n"
    )
    subprocess.run([sys.executable, "-c", script, str(daemon.pid)], check=True, timeout=60)


@pytest.mark.skipif("os.geteuid() != 0", reason="reaches into the daemon's memory, which takes root")
def test_verify_finds_the_block_that_was_written_to(tmp_path):  # case D3
    with running_daemon(tmp_path, memory={"checksums": True}) as daemon:
        with kvd_client.connect(daemon.folder) as client:
            cache = client.cache(model="m", layout=LAYOUT, checksums=True)
            seal_prompt(cache, list(range(160)), b"\1")
            assert "10 blocks are what their writers sealed" in doctor(daemon.folder, "--verify", "--all").stdout
            spoil(daemon)
            result = doctor(daemon.folder, "--verify")
            assert result.exit_code == 13
            assert "1 of 10 blocks are not what their writers sealed" in result.stdout
            assert cache.match(list(range(160))) < 160
        assert "9 blocks are what their writers sealed" in doctor(daemon.folder, "--verify", "--all").stdout


def test_blocks_without_checksums_are_counted(tmp_path):
    with running_daemon(tmp_path) as daemon, kvd_client.connect(daemon.folder) as client:
        seal_prompt(client.cache(model="m", layout=LAYOUT), list(range(160)), b"\1")
        assert "10 blocks have no checksum" in doctor(daemon.folder, "--verify").stdout


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_kernels_settings_are_read(tmp_path):
    write(tmp_path, "proc/sys/vm/max_map_count", "65530\n")
    write(tmp_path, "proc/sys/vm/overcommit_memory", "2\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write(tmp_path, "proc/meminfo", "MemTotal: 1 kB\nHugePages_Total:       8\nHugePages_Free:        3\n")
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n")
    assert kernel(tmp_path) == {
        "max_map_count": 65530, "overcommit_memory": 2, "transparent_huge_pages": "never", "num_huge_pages": 8,
        "num_huge_pages_free": 3, "has_nvidia_module": True, "driver_branch": 580,
    }  # fmt: skip


def test_a_machine_that_tells_nothing_is_no_crash(tmp_path):
    assert kernel(tmp_path) == {}
    assert login(tmp_path, 0) == {}


@pytest.mark.parametrize(
    ("text", "removes"), [("", True), ("#RemoveIPC=no\n", True), ("[Login]\nRemoveIPC=no\n", False)]
)
def test_what_a_logout_takes_along(tmp_path, text, removes):
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    write(tmp_path, "etc/systemd/logind.conf", text)
    assert login(tmp_path, 0) == {"has_systemd": True, "remove_ipc": removes, "lingers": False}
    write(tmp_path, "etc/systemd/logind.conf.d/ipc.conf", "[Login]\nRemoveIPC=yes\n")
    write(tmp_path, "var/lib/systemd/linger/root", "")
    assert login(tmp_path, 0) == {"has_systemd": True, "remove_ipc": True, "lingers": True}


def test_a_card_is_shown_and_torch_is_asked(tmp_path):
    machine = FakeMachine(tmp_path, P40)
    done = subprocess.run(
        [sys.executable, "-m", "kvd.cli", "doctor", "--all", "--runtime-dir", str(tmp_path)],
        env={**os.environ, **machine.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "ok  driver: Tesla P40, 64 MiB, compute capability 6.1" in done.stdout, done.stderr
    assert "is a CPU build, and there is a card" in done.stdout
    assert done.returncode == 13


def test_a_wrong_configuration_is_a_finding(tmp_path):
    (path := tmp_path / "kvd.toml").write_text("[memory]\nbugdet = 1\n")
    assert "bugdet" in gather(str(tmp_path), str(path), verify=False).config_problem
    assert "error  config:" in doctor(tmp_path, "--config", str(path)).stdout


def test_no_password_is_shown(tmp_path):
    (path := tmp_path / "kvd.toml").write_text('[tiers.redis]\nurl = "redis://:hunter2@h:1"\n')
    assert "hunter2" not in repr(gather(str(tmp_path), str(path), verify=False))
