"""A real daemon in its own process, and other client processes that a test steers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvd_client
from tests.client.processes import Worker
from tests.cuda.conftest import machine, start  # noqa: F401 - fixtures
from tests.support.daemon import Daemon, running_daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, budget="64MiB", segment="4MiB", memory={"checksums": True}) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.folder) as client:
        yield client


@pytest.fixture
def start_worker(daemon: Daemon) -> Iterator[Callable[[], Worker]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Worker(daemon.folder))
