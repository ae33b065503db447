"""A real daemon in a process of its own, one for all tests here: each test uses prompts or salts of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvd_client
from kvd.cli.demo.daemon import private_daemon


@pytest.fixture(scope="session")
def runtime_dir() -> Iterator[Path]:
    with private_daemon("--memory-budget", "512MiB", "--memory-segment", "4MiB") as daemon:
        yield daemon.runtime_dir


@pytest.fixture
def client(runtime_dir: Path) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(runtime_dir, label="test") as client:
        yield client
        # Whatever a test did to its caches, nothing of it is held afterwards and no invariant is broken.
        client.check()
        me = next(each for each in client.status().clients if each.session == client.session_id)
        assert (me.num_references, me.num_reserved, me.num_announced) == (0, 0, 0)


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """Keeps a test's prompts apart from those of the others."""
    return str(request.node.name)
