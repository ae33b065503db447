"""The example runs as it is written, in the environment that has a vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli.demo.daemon import private_daemon

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "clients" / "examples" / "vllm_shared.py"


def run(runtime_dir: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "clients")])
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=environ | threads | {"KVD_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.timeout(960)
def test_the_second_engine_finds_what_the_first_has_computed():
    with private_daemon("--memory-budget", "512MiB", "--memory-segment", "8MiB") as daemon:
        done = run(daemon.runtime_dir)
    assert done.returncode == 0, done.stderr
    found = [int(each) for each in re.findall(r"(\d+) of 2008 tokens reused", done.stdout)]
    assert found[0] == 0
    assert found[1] >= 1900
    assert "the second engine's first token came" in done.stdout


def test_without_a_daemon_it_says_so(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("no daemon listens in")
