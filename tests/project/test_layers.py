"""What a process loads: the daemon's side stays small, the command line stays quick."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers")


def loaded_by(statement: str) -> set[str]:
    source = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["kvd.cli.app", "kvd.daemon", "kvd.build", "kvd.config.load", "kvd_client"])
def test_nothing_heavy_is_imported(module):
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_the_daemon_does_not_load_the_client():
    assert not any(name.split(".")[0] == "kvd_client" for name in loaded_by("import kvd.daemon, kvd.build"))


def test_help_loads_no_command():
    loaded = loaded_by("from kvd.cli.app import app\napp(['--version'], standalone_mode=False)")
    assert loaded.isdisjoint({"rich", "zmq", "psutil", "kvd_client"})


@pytest.mark.parametrize("package", ["kvd", "kvd_client"])
def test_packages_are_typed(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert any((Path(folder) / "py.typed").exists() for folder in spec.submodule_search_locations)
