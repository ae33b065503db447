"""Each example runs as it is written, and finds the second time what it computed the first time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cli.demo.daemon import private_daemon

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "clients" / "examples"


@pytest.fixture(scope="module")
def own_dir() -> Iterator[Path]:
    with private_daemon("--memory-budget", "512MiB", "--memory-segment", "8MiB") as daemon:
        yield daemon.runtime_dir


def start(name: str, runtime_dir: Path) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "clients")])
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name)],
        env=environ | {"KVD_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out


def run(name: str, runtime_dir: Path) -> str:
    return output(start(name, runtime_dir))


def test_contiguous(own_dir: Path) -> None:
    first, second = run("contiguous.py", own_dir), run("contiguous.py", own_dir)
    assert first.startswith("0 of 200 tokens were there, 192 are shared now: ContiguousCache(4 layers")
    assert second.startswith("192 of 200 tokens were there, 192 are shared now")


def test_get_or_compute(own_dir: Path) -> None:
    """Two processes at once, then a third: one prefill, and nobody has other tokens."""
    several = [start("get_or_compute.py", own_dir) for _ in range(2)]
    outputs = [output(process) for process in several] + [run("get_or_compute.py", own_dir)]
    found = sorted(int(re.search(r"(\d+) of them found", each)[1]) for each in outputs)  # type: ignore[index]
    assert found == [0, 496, 496]
    assert "in memory" in outputs[-1]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_transformers_shared(own_dir: Path) -> None:
    first, second = run("transformers_shared.py", own_dir), run("transformers_shared.py", own_dir)
    num_prompt = int(re.search(r"0 of (\d+) prompt tokens were there\n", first)[1])  # type: ignore[index]
    assert f": {(num_prompt - 1) // 16 * 16} of {num_prompt} prompt tokens were there" in second


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_readme_names_it(path: Path) -> None:
    assert f"clients/examples/{path.name}" in (ROOT / "README.md").read_text()
