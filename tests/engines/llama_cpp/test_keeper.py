"""The slot keeper with a real daemon; what the server would answer is scripted here, so that it can be slow or odd."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvd.hashing import encode_tokens
from kvd_client.engines.llama_cpp import costs
from kvd_client.engines.llama_cpp.keeper import MAX_UNUSED, Keeper
from kvd_client.engines.llama_cpp.slots import Slots
from kvd_client.engines.llama_cpp.snapshots import Snapshots
from kvd_client.engines.llama_cpp.store import Store

PROMPT = encode_tokens(range(200))


class ScriptedServer:
    """Writes and reads slots' files as llama-server does: a header, the tokens, the state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slots: dict[int, bytes] = {}
        self.asked: list[str] = []
        self.refuses = False
        self.restores_too_few = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, path: str, body: Any) -> Any:
        self.asked.append(path)
        await self.may_answer.wait()
        number, _, action = path.removeprefix("/slots/").partition("?action=")
        file = self.folder / body["filename"]
        if self.refuses:
            return None
        if action == "save":
            tokens = self.slots[int(number)]
            file.write_bytes(struct.pack("<6I", 1, 2, 3, 4, 5, len(tokens)) + tokens + b"state" * 1000)
            return {"n_saved": len(tokens) // 4}
        content = file.read_bytes()
        self.slots[int(number)] = content[24 : -len(b"state" * 1000)]
        return {"n_restored": 1 if self.restores_too_few else len(self.slots[int(number)]) // 4}


class Desk:
    """A keeper, its slots and its server."""

    def __init__(self, runtime_dir: Path, name: str, folder: Path) -> None:
        self.server = ScriptedServer(folder)
        self.slots = Slots(2)
        self.store = Store(name, runtime_dir)
        self.keeper = Keeper(store=self.store, slots=self.slots, ask=self.server, folder=folder)
        self.counters = self.keeper.counters

    async def take(self, tokens: bytes) -> Any:
        slot, known = await self.slots.take(tokens)
        self.keeper.requests_changed()
        return slot, await self.keeper.restore(slot, tokens, known)

    def give_back(self, slot: Any, tokens: bytes, prefill_s: float = 1.0, **options: Any) -> None:
        """The completion is over."""
        self.server.slots[slot.number] = slot.tokens = tokens
        self.slots.release(slot)
        self.keeper.requests_changed()
        self.keeper.save_later(slot, tokens, prefill_s, **options)

    async def complete(self, tokens: bytes) -> int:
        """Whole; how many tokens were restored. The snapshot is kept when this returns."""
        slot, known = await self.take(tokens)
        self.give_back(slot, tokens)
        await asyncio.gather(slot.saving)
        return known


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer than a request whose worth is unknown would wait."""
    monkeypatch.setattr(costs, "UNKNOWN_WAIT_S", 30.0)


@pytest.fixture
async def desk(runtime_dir: Path, salt: str, tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(runtime_dir, salt, tmp_path)
    yield desk
    desk.server.may_answer.set()
    await desk.keeper.drain()
    await asyncio.to_thread(desk.keeper.close)
    assert not list(tmp_path.iterdir()), "no file is left"


@pytest.fixture
async def other(runtime_dir: Path, salt: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    """Another server of the same model."""
    desk = Desk(runtime_dir, salt, tmp_path_factory.mktemp("other"))
    yield desk
    await asyncio.to_thread(desk.keeper.close)


async def test_what_one_keeps_another_restores(desk: Desk, other: Desk) -> None:
    assert await desk.complete(PROMPT) == 0
    assert (desk.counters["misses"], desk.counters["saves"]) == (1, 1)
    slot, known = await other.take(PROMPT)
    assert known == 192
    assert other.server.slots[slot.number] == PROMPT
    assert other.counters["restored_tokens"] == 192


async def test_what_is_kept_already_is_not_written_again(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    await other.complete(PROMPT + encode_tokens(range(40)))
    assert other.server.asked == ["/slots/0?action=restore"]


async def test_a_slot_that_has_it_is_left_alone(desk: Desk) -> None:
    await desk.complete(PROMPT)
    assert await desk.complete(PROMPT) == 200
    assert desk.server.asked == ["/slots/0?action=save"]


async def test_a_daemon_that_hangs_costs_no_more_than_the_restore_would_save(desk: Desk, monkeypatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(desk.store, "snapshots", lambda: hangs.wait(30) and None)
    desk.keeper.costs.computed(1000, 0.1)
    assert desk.keeper.costs.bound_s(200) == pytest.approx(0.02)
    try:
        _, known = await asyncio.wait_for(desk.take(PROMPT), 10)
    finally:
        hangs.set()
    assert known == 0
    assert desk.counters["late"] == 1


async def test_a_restore_that_would_cost_more_is_not_made(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    other.keeper.costs.computed(1_000_000, 0.001)
    slot, known = await other.take(PROMPT)
    assert known == 0
    assert other.server.asked == []
    assert not slot.tokens


async def test_a_snapshot_waits_until_no_request_runs(desk: Desk) -> None:
    busy, _ = await desk.take(encode_tokens([9] * 100))
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT)
    done, _ = await asyncio.wait([slot.saving], timeout=0.2)
    assert not done
    assert desk.server.asked == []
    desk.give_back(busy, encode_tokens([9] * 10))
    await asyncio.gather(slot.saving)
    assert desk.server.asked == ["/slots/1?action=save"]


@pytest.mark.parametrize(("prefill_s", "kept"), [(100.0, 1), (0.0, 0)])
async def test_on_a_busy_server_only_what_was_dear_is_kept(desk: Desk, monkeypatch, prefill_s, kept) -> None:
    monkeypatch.setattr("kvd_client.engines.llama_cpp.keeper.QUIET_BOUND_S", 0.05)
    await desk.take(encode_tokens([9] * 100))
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT, prefill_s)
    await asyncio.gather(slot.saving)
    assert (desk.counters["saves"], desk.counters["postponed_saves"]) == (kept, 1 - kept)


async def test_the_next_request_of_the_slot_does_not_wait_for_a_snapshot(desk: Desk) -> None:
    busy, _ = await desk.take(encode_tokens([9] * 100))
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT)
    again, known = await desk.take(PROMPT)
    assert (again, known) == (slot, 200)
    await asyncio.gather(slot.saving, return_exceptions=True)
    assert slot.saving.cancelled()
    assert desk.server.asked == []
    desk.slots.release(busy)


async def test_a_slot_taken_in_the_very_moment_of_quiet_is_not_written(desk: Desk) -> None:
    """The save is cancelled as its wait ends, which asyncio.wait_for of Python 3.11 does not tell it."""
    busy, _ = await desk.take(encode_tokens([9] * 100))
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT)
    while not desk.keeper._quiet._waiters:
        await asyncio.wait([slot.saving], timeout=0.01)
    saving = slot.saving
    desk.slots.release(busy)
    desk.keeper.requests_changed()
    assert (await desk.take(PROMPT))[0] is slot
    await asyncio.gather(saving, return_exceptions=True)
    assert desk.server.asked == []


async def test_a_slot_that_somebody_else_has_used_is_not_kept_under_our_tokens(desk: Desk, other: Desk) -> None:
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT)
    desk.server.slots[slot.number] = encode_tokens([7] * 200)
    await asyncio.gather(slot.saving)
    assert desk.counters["saves"] == 0
    assert await other.complete(PROMPT) == 0


# case E5
async def test_what_other_adapters_may_have_computed_since_is_not_kept(desk: Desk, other: Desk) -> None:
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT, is_ours=lambda: False)
    await asyncio.gather(slot.saving)
    assert desk.server.asked == []
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT, is_ours=lambda: not desk.server.asked)
    await asyncio.gather(slot.saving)
    assert desk.server.asked == ["/slots/0?action=save"]
    assert desk.counters["saves"] == 0
    assert await other.complete(PROMPT) == 0


# case E5
async def test_no_snapshot_is_restored_under_other_adapters(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    slot, known = await other.slots.take(PROMPT)
    assert await other.keeper.restore(slot, PROMPT, known, lambda: False) == 0
    assert other.server.asked == []


async def test_a_snapshot_that_is_being_written_is_kept_whoever_comes_next(desk: Desk, other: Desk) -> None:
    desk.server.may_answer.clear()
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT)
    while not desk.server.asked:
        await asyncio.wait([slot.saving], timeout=0.01)
    saving = slot.saving
    assert (await desk.take(PROMPT))[0] is slot
    desk.server.may_answer.set()
    await asyncio.gather(saving)
    assert await other.complete(PROMPT) == 192


async def test_a_server_that_restores_fewer_tokens_than_it_was_given_computes(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    other.slots.all[0].tokens = PROMPT[: 40 * 4]
    other.server.restores_too_few = True
    slot, known = await other.take(PROMPT)
    assert (known, slot.tokens) == (0, b""), "nobody knows what is in the slot"
    assert other.counters["failed_restores"] == 1


async def test_a_store_that_was_closed_connects_no_more(desk: Desk) -> None:
    assert desk.store.snapshots() is not None
    desk.store.close()
    assert desk.store.snapshots() is None


async def test_a_snapshot_of_other_tokens_is_refused(desk: Desk) -> None:
    snapshots = desk.store.snapshots()
    assert isinstance(snapshots, Snapshots)
    await asyncio.to_thread(snapshots.save, PROMPT, b"header" * 4 + encode_tokens([7] * 200) + b"state")
    _, known = await desk.take(PROMPT)
    assert known == 0
    assert (desk.counters["refused"], desk.server.asked) == (1, [])


async def test_a_server_that_refuses_a_snapshot_computes(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    other.slots.all[0].tokens = PROMPT[: 40 * 4]
    other.server.refuses = True
    slot, known = await other.take(PROMPT)
    assert (known, slot.tokens) == (0, b""), "it has cleared the slot"
    assert other.counters["failed_restores"] == 1


async def test_a_server_that_cannot_save_is_asked_again_next_time(desk: Desk) -> None:
    desk.server.refuses = True
    await desk.complete(PROMPT)
    assert desk.counters["failed_saves"] == 1
    desk.server.refuses = False
    await desk.complete(PROMPT)
    assert desk.counters["saves"] == 1


async def test_a_model_that_does_not_use_restored_states_gets_no_more(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    for _ in range(MAX_UNUSED):
        assert other.keeper.is_cuttable
        other.keeper.completed(192, 0, (0, 200, 1.0))
    assert not other.keeper.is_cuttable
    _, known = await other.take(PROMPT)
    assert known == 0


async def test_a_client_that_goes_away_leaves_no_file(desk: Desk, other: Desk) -> None:
    await desk.complete(PROMPT)
    other.server.may_answer.clear()
    task = asyncio.create_task(other.take(PROMPT))
    while not other.server.asked:
        await asyncio.wait([task], timeout=0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(lambda: None))])
    assert not list(other.server.folder.iterdir())


async def test_stopping_writes_what_waits(desk: Desk, other: Desk) -> None:
    slot, _ = await desk.take(PROMPT)
    desk.give_back(slot, PROMPT)
    await desk.keeper.drain()
    assert desk.counters["saves"] == 1
