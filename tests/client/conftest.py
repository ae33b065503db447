"""A real daemon in its own process, on host memory or on a card, and other client processes that a test steers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvd_client
from tests.client.homes import fake_machine
from tests.client.processes import Worker
from tests.cuda.conftest import machine, start  # noqa: F401 - fixtures
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import Daemon, running_daemon


@pytest.fixture(scope="module", params=["host", "card"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMachine | None]:
    if request.param == "host":
        yield None
        return
    with fake_machine(tmp_path_factory.mktemp("machine")) as machine:  # noqa: F811
        yield machine


@pytest.fixture
def daemon(tmp_path: Path, home: FakeMachine | None) -> Iterator[Daemon]:
    with running_daemon(tmp_path, budget="64MiB", segment="4MiB", memory={"checksums": True}, machine=home) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.folder) as client:
        yield client


@pytest.fixture
def start_worker(daemon: Daemon) -> Iterator[Callable[[], Worker]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Worker(daemon.folder))
