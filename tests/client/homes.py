"""Where the daemon of a test keeps its blocks: each test of this folder that has one runs on host memory and on a card.

The fixture `home` is the fake machine, or None for host memory. `host_only("why")` marks tests that are about how host
memory is mapped. `empty_the_pool(client)` makes sure of adjacent blocks where one daemon serves many tests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvd_client
from kvd_client.memory import device_imports
from kvd_client.memory.attendant import attendant
from kvd_client.memory.device_imports import shared_driver
from tests.fakecuda.machine import Card, FakeMachine
from tests.support.wait import eventually

CARDS = (
    Card("Tesla P40", "GPU-a0b1c2d3-e4f5-0011-2233-445566778899", 512, "6.1"),
    Card("NVIDIA GeForce RTX 3050", "GPU-b7000000-0000-0000-0000-000000003050", 256, "8.6", display=True),
)


def host_only(_why: str) -> pytest.MarkDecorator:
    """The test says nothing about memory on a card, for the reason given."""
    return pytest.mark.parametrize("home", ["host"], indirect=True)


def let_go() -> None:
    """Returns when what died has been let go of: on a card that is another thread's work."""
    gc.collect()
    # Twice: when the card is done with the last view, what showed it is queued to be closed.
    assert attendant().settle(10)
    assert attendant().settle(10)


def empty_the_pool(client: kvd_client.Client) -> None:
    """Whatever earlier tests left is gone, so every request gets adjacent blocks.

    On a card it depends on that what is copied and what moves; tests/client/test_scattered.py has the opposite.
    """
    let_go()

    def is_empty() -> bool:
        client.flush(tier="pool")
        return not any(pool.num_reserved + pool.num_filling + pool.num_sealed for pool in client.status().pools)

    eventually(is_empty)


@contextmanager
def fake_machine(folder: Path) -> Iterator[FakeMachine]:
    """Two cards for this process and those it starts; at the end nothing of theirs may be open here."""
    machine = FakeMachine(folder, *CARDS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environ.items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        shared_driver.cache_clear()
        yield machine
        let_go()
        assert device_imports.num_open() == 0
        shared_driver.cache_clear()
