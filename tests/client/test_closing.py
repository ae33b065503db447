"""Closing a client whose daemon is dead or silent: everything of ours is closed, and no error hides the caller's."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

import kvd_client
import kvd_client.aio
from kvd.errors import ClientClosed
from kvd_client.memory.attendant import attendant
from tests.client.homes import let_go
from tests.client.kv import LAYOUT, MODEL, fill, keys_values
from tests.client.patience import gives_up_after
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import Daemon
from tests.support.wait import eventually

PROMPT = list(range(800, 900))
Fault = Callable[[Daemon], AbstractContextManager[None]]


@contextmanager
def silent(daemon: Daemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@contextmanager
def dead(daemon: Daemon) -> Iterator[None]:
    daemon.kill()
    yield


def num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def attendant_runs(home: FakeMachine | None) -> None:
    """The thread that attends to device memory stays; its descriptors are not counted."""
    if home is not None:
        attendant()._start()


@pytest.mark.parametrize("fault", [silent, dead])
def test_a_client_closes_beside_live_tensors_whatever_became_of_the_daemon(
    daemon: Daemon, home: FakeMachine | None, fault: Fault
) -> None:
    attendant_runs(home)
    before = num_descriptors()
    tensors: list[torch.Tensor] = []

    def fail() -> None:
        with kvd_client.connect(daemon.folder) as client:
            seq = client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
            fill(seq, PROMPT)
            tensors.extend(seq.layer(1))
            stack.enter_context(fault(daemon))
            stack.enter_context(gives_up_after(0.3, client))
            raise ArithmeticError("the caller's own")

    with ExitStack() as stack:
        with pytest.raises(ArithmeticError, match="the caller's own"):
            fail()
        assert torch.equal(tensors[0], keys_values(1, PROMPT, 0, 100)[0])
        if home is not None or fault is silent:
            # Held open as long as a tensor shows what is there: the fake card's memory, and a session of a daemon that
            # lives, or that would give the blocks to others.
            tensors.clear()
            let_go()
        assert num_descriptors() == before
    tensors.clear()


@pytest.mark.parametrize("fault", [silent, dead])
async def test_an_asyncio_client_closes_beside_live_tensors_whatever_became_of_the_daemon(
    daemon: Daemon, home: FakeMachine | None, fault: Fault
) -> None:
    tensors: list[torch.Tensor] = []
    attendant_runs(home)
    before = num_descriptors()

    async def fail() -> None:
        async with kvd_client.aio.connect(daemon.folder) as client:
            seq = await (await client.cache(model=MODEL, layout=LAYOUT)).sequence(PROMPT)
            for layer in range(LAYOUT.num_layers):
                await seq.append(layer, *keys_values(layer, PROMPT, 0, 100))
            tensors.extend(seq.layer(1))
            stack.enter_context(fault(daemon))
            stack.enter_context(gives_up_after(0.3, client))
            raise ArithmeticError("the caller's own")

    with ExitStack() as stack:
        with pytest.raises(ArithmeticError, match="the caller's own"):
            await fail()
        assert torch.equal(tensors[0], keys_values(1, PROMPT, 0, 100)[0])
        if home is not None or fault is silent:
            # Held open as long as a tensor shows what is there: the fake card's memory, and a session of a daemon that
            # lives, or that would give the blocks to others.
            tensors.clear()
            let_go()
        assert num_descriptors() == before
    tensors.clear()


async def test_a_session_that_is_being_renewed_is_closed_too(daemon: Daemon) -> None:
    client = await kvd_client.aio.connect(daemon.folder)
    cache = await client.cache(model=MODEL, layout=LAYOUT)
    daemon.kill()
    daemon.start()
    matching = asyncio.create_task(cache.match(PROMPT))
    # Until the task, which hears of the restart, is connecting again.
    while not client._runner._reconnecting.locked():
        await asyncio.sleep(0)
    await client.close()
    with suppress(ClientClosed):
        await matching
    with kvd_client.connect(daemon.folder) as observer:
        eventually(lambda: len(observer.status().clients) == 1)
