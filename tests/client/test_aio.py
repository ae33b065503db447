"""The asyncio twin: the same verbs, and nothing left behind by a cancelled call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import torch

import kvd_client
import kvd_client.aio
from kvd.errors import (
    ClientClosed,
    ConnectionFailed,
    DaemonRestarted,
    DaemonUnavailable,
    InvalidRequest,
    RequestTimeout,
    WouldWait,
)
from kvd.protocol import wire
from kvd_client.transport.aio_runner import AsyncRunner
from tests.client.kv import LAYOUT, MODEL, holds, keys_values
from tests.client.patience import gives_up_after
from tests.client.processes import Worker
from tests.support.daemon import Daemon
from tests.support.wait import eventually

PROMPT = list(range(600, 700))


async def fill(seq: kvd_client.aio.Sequence, tokens: list[int]) -> None:
    for layer in range(seq.layout.num_layers):
        await seq.append(layer, *keys_values(layer, tokens, seq.num_tokens_in(layer), len(tokens)))


async def own_figures(client: kvd_client.aio.Client) -> tuple[int, int, int, int]:
    """References, reservations, announcements, waits. What a task has just begun was sent, and handled, before."""
    # Two round trips: during the first one the task sends, and the daemon takes a session's requests in order.
    await client.check()
    (own,) = [entry for entry in (await client.status()).clients if entry.session == client.session_id]
    return own.num_references, own.num_reserved, own.num_announced, own.num_waiting


@pytest.fixture
async def aclient(daemon: Daemon) -> AsyncIterator[kvd_client.aio.Client]:
    async with kvd_client.aio.connect(daemon.folder) as client:
        yield client


@pytest.fixture
async def acache(aclient: kvd_client.aio.Client) -> kvd_client.aio.Cache:
    return await aclient.cache(model=MODEL, layout=LAYOUT)


async def test_an_answer_that_is_not_understood_ends_the_session_at_once(
    aclient: kvd_client.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as garbled:
        garbled.setattr(wire, "_body", lambda frame: memoryview(b"\x80\x04garbage"))
        with pytest.raises(ConnectionFailed, match="not understood"):
            await aclient.status()
    assert (await aclient.status()).clients, "the next call finds the daemon again"


async def test_every_verb(aclient: kvd_client.aio.Client, acache: kvd_client.aio.Cache) -> None:
    async with await acache.sequence(PROMPT) as seq:
        await fill(seq, PROMPT)
        assert await seq.commit() == 96
        async with await seq.fork() as other:
            await other.truncate(50)
            await fill(other, [*PROMPT[:50], *[1] * 200])
            assert holds(other, [*PROMPT[:50], *[1] * 200], 250)
        await seq.extend(1000)
        assert seq.capacity_tokens >= 1000
        assert holds(seq, PROMPT, 100)
    assert await acache.match(PROMPT) == 96
    async with await acache.allocate_sequence(20) as raw:
        assert raw.capacity_tokens == 20
    with pytest.raises(ClientClosed):
        await raw.commit()
    assert await own_figures(aclient) == (0, 0, 0, 0)


async def test_both_clients_find_each_others_blocks(acache: kvd_client.aio.Cache, daemon: Daemon) -> None:
    async def compute(seq: kvd_client.aio.Sequence) -> None:
        await fill(seq, PROMPT)

    async with await acache.get_or_compute(PROMPT, compute):
        with (
            kvd_client.connect(daemon.folder) as client,
            client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq,
        ):
            assert seq.num_cached_tokens == 96
            assert holds(seq, PROMPT, 96)


async def test_a_failed_computation_leaves_nothing(
    aclient: kvd_client.aio.Client, acache: kvd_client.aio.Cache
) -> None:
    async def fail(_seq: kvd_client.aio.Sequence) -> None:
        await asyncio.sleep(0)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        await acache.get_or_compute(PROMPT, fail)
    with pytest.raises(InvalidRequest):
        await acache.get_or_compute(PROMPT, lambda _seq: None)
    assert await own_figures(aclient) == (0, 0, 0, 0)


async def test_a_layer_at_a_time(acache: kvd_client.aio.Cache) -> None:
    async def compute_layer(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return keys_values(0, PROMPT, start, stop)

    async with await acache.sequence(PROMPT) as seq:
        keys, _ = await seq.get_or_compute(0, compute_layer)
        await seq.get_or_compute(1, lambda start, stop: keys_values(1, PROMPT, start, stop))
        assert seq.num_sealed_tokens == 0
        await seq.get_or_compute(2, lambda start, stop: keys_values(2, PROMPT, start, stop))
        assert seq.num_sealed_tokens == 96
        assert torch.equal(keys, keys_values(0, PROMPT, 0, 100)[0])


async def test_many_tasks_over_one_client(aclient: kvd_client.aio.Client, acache: kvd_client.aio.Cache) -> None:
    async def one(number: int) -> bool:
        tokens = [*range(64), *[number] * 40]
        async with await acache.sequence(tokens, wait_s=0) as seq:
            await fill(seq, tokens)
            await seq.commit()
            return holds(seq, tokens, 104)

    assert all(await asyncio.gather(*[one(number) for number in range(100)]))
    assert await own_figures(aclient) == (0, 0, 0, 0)


async def test_a_cancelled_begin_gives_back_what_still_comes(
    aclient: kvd_client.aio.Client, acache: kvd_client.aio.Cache, start_worker: Callable[[], Worker]
) -> None:
    writer = start_worker()
    writer.call("begin", tokens=PROMPT)
    waiting = asyncio.create_task(acache.sequence(PROMPT, wait_s=60))
    assert (await own_figures(aclient))[3] == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert writer.call("fill_and_commit") == 96
    await asyncio.wait(set(aclient._runner._background), timeout=10)
    assert await own_figures(aclient) == (0, 0, 0, 0)


async def test_a_cancelled_commit_is_seen_through(aclient: kvd_client.aio.Client, acache: kvd_client.aio.Cache) -> None:
    seq = await acache.sequence(PROMPT)
    await fill(seq, PROMPT)
    task = asyncio.create_task(seq.commit())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await seq.close()
    assert await own_figures(aclient) == (0, 0, 0, 0)
    assert await acache.match(PROMPT) == 96


async def test_closing_with_a_begin_under_way(daemon: Daemon, aclient: kvd_client.aio.Client) -> None:
    cache = await aclient.cache(model=MODEL, layout=LAYOUT)
    async with await cache.sequence(PROMPT):
        other = await kvd_client.aio.connect(daemon.folder)
        waiting = asyncio.create_task((await other.cache(model=MODEL, layout=LAYOUT)).sequence(PROMPT, wait_s=60))
        assert (await own_figures(other))[3] == 1
        await other.close()
        with pytest.raises(ClientClosed):
            await waiting


async def test_tensors_outlive_the_client_and_its_loop(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.folder) as observer:

        async def attach() -> torch.Tensor:
            async with kvd_client.aio.connect(daemon.folder) as client:
                seq = await (await client.cache(model=MODEL, layout=LAYOUT)).sequence(PROMPT)
                await fill(seq, PROMPT)
                return seq.layer(0)[0]

        keys = await asyncio.to_thread(asyncio.run, attach())
        assert len(observer.status().clients) == 2
        assert torch.equal(keys, keys_values(0, PROMPT, 0, 100)[0])
        del keys
        # In a thread, since this loop's last step still holds its result, the tensor.
        await asyncio.to_thread(eventually, lambda: len(observer.status().clients) == 1)


# case B12
async def test_a_restart_is_told_to_whom_it_concerns(
    daemon: Daemon, aclient: kvd_client.aio.Client, acache: kvd_client.aio.Cache
) -> None:
    seq = await acache.sequence(PROMPT)
    await fill(seq, PROMPT)
    daemon.kill()
    daemon.start()
    with pytest.raises(DaemonRestarted):
        await seq.commit()
    with pytest.raises(DaemonRestarted):
        await acache.match(PROMPT)
    assert holds(seq, PROMPT, 100)
    await seq.close()
    assert await acache.match(PROMPT) == 0


# case B13
async def test_a_default_wait_with_own_announcements_is_refused(
    acache: kvd_client.aio.Cache, start_worker: Callable[[], Worker]
) -> None:
    other = [*range(3000, 3100)]
    start_worker().call("begin", tokens=other)
    async with await acache.sequence(PROMPT):
        with pytest.raises(WouldWait):
            await acache.sequence(other)


async def test_a_daemon_that_does_not_answer_is_a_time_out(daemon: Daemon) -> None:
    import os
    import signal

    async with kvd_client.aio.connect(daemon.folder) as client:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with gives_up_after(0.3, client), pytest.raises(RequestTimeout):
                await client.status()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        # It held nothing, so it connects again.
        assert len((await client.status()).clients) == 1


# case B12
async def test_after_every_restart_the_loop_hears_of_the_next(daemon: Daemon) -> None:
    async with kvd_client.aio.connect(daemon.folder, timeout_s=5) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT)
        for _ in range(3):
            assert await cache.match(PROMPT) == 0
            lost = heard_of_the_end(client)
            daemon.kill()
            daemon.start()
            async with asyncio.timeout(10):
                await lost.wait()


def heard_of_the_end(client: kvd_client.aio.Client) -> asyncio.Event:
    """Set once the client's session is lost."""
    link, heard = client._runner.link, asyncio.Event()
    tell = link.when_lost

    def when_lost() -> None:
        tell()
        heard.set()

    link.when_lost = when_lost
    return heard


# case B12
async def test_a_daemon_that_dies_right_after_it_greeted_is_unavailable(
    daemon: Daemon, aclient: kvd_client.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = AsyncRunner.connect

    async def connect_to_the_dying(runner: AsyncRunner) -> None:
        await connect(runner)
        daemon.kill()

    daemon.kill()
    daemon.start()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncRunner, "connect", connect_to_the_dying)
        with pytest.raises(DaemonUnavailable, match="ended as this client connected"):
            await aclient.status()
    daemon.start()
    assert len((await aclient.status()).clients) == 1


# case B12
async def test_token_ids_that_are_read_once_survive_a_restart(daemon: Daemon, acache: kvd_client.aio.Cache) -> None:
    daemon.kill()
    daemon.start()
    async with await acache.sequence(iter(PROMPT)) as seq:
        assert seq.token_ids == PROMPT
