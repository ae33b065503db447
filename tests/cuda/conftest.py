"""A machine with two fake cards, the driver in this process, and other processes on the same machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.cuda import Context, Driver
from kvd_client.memory.device_imports import shared_driver
from tests.cuda.process import CudaProcess
from tests.fakecuda.machine import FakeMachine

Start = Callable[..., CudaProcess]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    machine = FakeMachine(tmp_path)
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shared_driver.cache_clear()
    yield machine
    shared_driver.cache_clear()


@pytest.fixture
def driver(machine: FakeMachine) -> Driver:
    return Driver()


@pytest.fixture
def p40(driver: Driver) -> Iterator[Context]:
    with driver.open(driver.devices[0]) as context:
        yield context


@pytest.fixture
def start(machine: FakeMachine) -> Iterator[Start]:
    """Starts a process on the machine: `start()`, `start(CUDA_VISIBLE_DEVICES="1")`, `start(prefix=[...])`."""
    with contextlib.ExitStack() as stack:
        yield lambda **extra: stack.enter_context(CudaProcess(machine.environ, **extra))
