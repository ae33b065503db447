"""The demo as a person runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvd.cli.demo.daemon import clean_environ

COMMAND = [sys.executable, "-m", "kvd.cli", "demo"]


def environ(folder: Path) -> dict[str, str]:
    root = Path(__file__).parents[2]
    return clean_environ() | {"TMPDIR": str(folder), "PYTHONPATH": f"{root}{os.pathsep}{root / 'clients'}"}


@pytest.mark.model
@pytest.mark.timeout(900)
def test_five_processes_and_two_daemons_share_two_documents(short_path: Path) -> None:
    done = subprocess.run(COMMAND, env=environ(short_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.split()[-1:] == ["yes"]}
    assert list(rows) == ["A", "B", "C", "D", "E"]
    reused = {name: int(row[2].replace(",", "")) for name, row in rows.items()}
    assert (reused["A"], reused["B"], reused["E"]) == (0, 2048, 2048)
    # One of the two computed the second document; what it reused is at most the chat template's first words.
    assert sorted((reused["C"] > 1900, reused["D"] > 1900)) == [False, True]
    assert all(row[3:5] == ["0", "B"] for row in rows.values())
    assert "kvd status" in done.stdout
    assert list(short_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_it_leaves_nothing(short_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(COMMAND, env=environ(short_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "process A (pid" in line)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(number)
        assert process.wait(30) == 1
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert list(short_path.iterdir()) == []
