"""Real engines, each a process of its own, started once, side by side. Without vLLM nothing here is collected.

`make test-vllm` runs these tests, with a vLLM in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, running_daemon
from tests.vllm.engine import Engine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        # What vLLM and torch say of each other is no concern of these tests, in which every warning is an error.
        warnings.simplefilter("ignore")
        import kvd_client.engines.vllm  # noqa: F401


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def daemon_of_all(place: Path) -> Iterator[Daemon]:
    with running_daemon(place, budget="64MiB", segment="1MiB", memory={"checksums": True}) as daemon:
        yield daemon


@pytest.fixture
def daemon(daemon_of_all: Daemon) -> Daemon:
    """One that runs, though the test before may have killed it; what earlier tests stored may still be there."""
    if not daemon_of_all.is_alive:
        daemon_of_all.start()
    return daemon_of_all


class Engines:
    """Makes the engines that a test session needs, all at once, when the first is asked for."""

    def __init__(self, place: Path, runtime_dir: Path) -> None:
        from tests.vllm import models

        model = models.llama(place / "model")
        other = models.llama(place / "other", seed=1)
        windowed = models.windowed(place / "windowed")
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}

        def start(name: str, folder: Path, **arguments: Any) -> Engine:
            return Engine(folder, runtime_dir, place / f"{name}.log", **arguments)

        self.writer = start("writer", model, **lora)
        self.reader = start("reader", model, async_scheduling=True, **lora)
        self.plain = start("plain", model, connector=None, **lora)
        self.other = start("other", other)
        self.windowed = start("windowed", windowed)

    def close(self) -> None:
        for engine in vars(self).values():
            engine.process.stdin.close()
        for engine in vars(self).values():
            assert engine.process.wait(120) == 0, engine.log()[-6000:]
            engine.process.stdout.close()


@pytest.fixture(scope="session")
def engines(place: Path, daemon_of_all: Daemon) -> Iterator[Engines]:
    engines = Engines(place, daemon_of_all.folder)
    yield engines
    engines.close()


@pytest.fixture
def writer(engines: Engines, daemon: Daemon) -> Engine:
    """Stores what the others find. It serves adapters."""
    engines.writer.call("end_pause")
    return engines.writer


@pytest.fixture
def reader(engines: Engines, daemon: Daemon) -> Engine:
    """Another process with the same model, which schedules the next step while one runs."""
    engines.reader.call("end_pause")
    return engines.reader


@pytest.fixture
def plain(engines: Engines) -> Engine:
    """The same model without kvd: what is right."""
    return engines.plain


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """Prompts that no other test has."""
    from tests.vllm import models

    def make(num_tokens: int = 200, *, number: int = 0) -> list[int]:
        seed = zlib.crc32(f"{request.node.nodeid}/{number}".encode())
        return models.prompt(num_tokens, seed)

    return make
