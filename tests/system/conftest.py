"""These boot a real systemd. `make test-systemd` says where its root is; without one they are not collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.machine import Machine

ROOT_VARIABLE = "KVD_SYSTEMD_ROOT"
collect_ignore_glob = [] if os.environ.get(ROOT_VARIABLE) else ["test_*.py"]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Booted once for all tests."""
    if ROOT_VARIABLE not in os.environ:
        pytest.skip("make test-systemd runs this")
    machine = Machine(Path(os.environ[ROOT_VARIABLE]), tmp_path_factory.mktemp("machine") / "console.log")
    try:
        yield machine
    finally:
        machine.close()
