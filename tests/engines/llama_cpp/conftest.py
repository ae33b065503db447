"""One daemon and a few servers for all tests here: each takes seconds to load. Tests use prompts of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cli.demo.daemon import private_daemon
from tests.engines.llama_cpp.servers import PlainServer, SharingServer

collect_ignore = [] if "KVD_LLAMA_CPP_PYTHON" in os.environ else ["test_llama_cpp_python.py"]
"""`make test-llama-cpp-python` sets it: building the package takes longer than all tests."""


@pytest.fixture(scope="session")
def llama_daemon() -> Iterator[Path]:
    with private_daemon("--memory-budget", "512MiB", "--memory-segment", "4MiB") as daemon:
        yield daemon.runtime_dir


@pytest.fixture(scope="session")
def plain() -> Iterator[PlainServer]:
    """Without kvd: what the others must answer."""
    with PlainServer() as server:
        yield server


@pytest.fixture(scope="session")
def first(llama_daemon: Path) -> Iterator[SharingServer]:
    with SharingServer(llama_daemon) as server:
        yield server


@pytest.fixture(scope="session")
def second(llama_daemon: Path) -> Iterator[SharingServer]:
    with SharingServer(llama_daemon, "--api-key", "secret") as server:
        server.headers = {"Authorization": "Bearer secret"}
        yield server
