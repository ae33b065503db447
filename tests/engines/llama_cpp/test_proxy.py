"""The proxy between a client and a scripted server: what adapters that change do to snapshots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvd.hashing import encode_tokens
from kvd_client.engines.llama_cpp import serve
from kvd_client.engines.llama_cpp.arguments import parse
from kvd_client.engines.llama_cpp.keeper import IsOurs
from kvd_client.engines.llama_cpp.proxy import Proxy
from kvd_client.engines.llama_cpp.slots import Slot, Slots

PROMPT = {"prompt": [*range(200)]}
OTHER_WAY = PROMPT | {"lora": [{"id": 0, "scale": 0.0}]}


class ScriptedServer:
    """Answers everything; completions name the slot they were sent to."""

    def __init__(self) -> None:
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._answer)
        self.props = {"model_path": __file__, "total_slots": 2}
        self.props_status = 200

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/props":
            return web.json_response(self.props, status=self.props_status)
        body = await request.json()
        return web.json_response({"id_slot": body.get("id_slot") if isinstance(body, dict) else None})


class ScriptedKeeper:
    """Notes what it is asked to keep, and whether it may."""

    name = "scripted"

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.may_restore: list[IsOurs] = []
        self.may_keep: list[IsOurs] = []

    def requests_changed(self) -> None:
        pass

    async def restore(self, slot: Slot, tokens: bytes, num_known: int, is_ours: IsOurs) -> int:
        assert tokens == encode_tokens(PROMPT["prompt"])
        self.may_restore.append(is_ours)
        return num_known

    def completed(self, *_arguments: object) -> None:
        pass

    def save_later(self, slot: Slot, tokens: bytes, prefill_s: float, is_ours: IsOurs) -> None:
        self.may_keep.append(is_ours)


class Child:
    pid = 0


class Desk:
    """A proxy with its client; `options` are those of the server."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket_path = folder / "server.sock"
        self.arguments = parse(options, {})
        self.proxy = Proxy(self.socket_path, self.arguments)
        self.keeper = ScriptedKeeper()
        self.server = ScriptedServer()
        self.client: TestClient[Any, Any] = TestClient(TestServer(self.proxy.app))

    def begin(self) -> None:
        self.proxy.keeper, self.proxy.slots, self.proxy.why_not = self.keeper, Slots(2), ""  # type: ignore[assignment]

    async def begin_keeping(self, folder: Path) -> None:
        await serve._begin_keeping(self.proxy, self.arguments, Child(), folder, None)  # type: ignore[arg-type]

    async def post(self, path: str, body: Any) -> Any:
        async with self.client.post(path, json=body) as response:
            return await response.json()

    async def complete(self, body: dict[str, Any] = PROMPT) -> bool:
        """Whether it went by way of the keeper."""
        return (await self.post("/completion", body))["id_slot"] is not None


@pytest.fixture
async def desk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path, *getattr(request, "param", ("--lora", "a.gguf")))
    runner = web.AppRunner(desk.server.app)
    await runner.setup()
    await web.UnixSite(runner, str(desk.socket_path)).start()
    async with desk.client:
        yield desk
    await desk.proxy.close()
    await runner.cleanup()


# case E5
async def test_adapters_that_are_changed_end_snapshots(desk: Desk) -> None:
    desk.begin()
    assert await desk.complete()
    (may_keep,) = desk.keeper.may_keep
    assert may_keep()
    await desk.post("/lora-adapters", [{"id": 0, "scale": 0.5}])
    assert not may_keep(), "what waits to be kept may be computed anew meanwhile"
    assert not await desk.complete()
    assert desk.proxy.keeper is None
    assert "adapters" in desk.proxy.why_not
    assert len(desk.keeper.may_keep) == 1


# case E5
async def test_a_completion_that_waited_for_a_slot_while_they_changed_restores_and_keeps_nothing(desk: Desk) -> None:
    desk.begin()
    taken = [(await desk.proxy.slots.take(b""))[0] for _ in range(2)]
    completing = asyncio.create_task(desk.complete())
    while not desk.proxy.slots._waiting:
        await asyncio.wait([completing], timeout=0.01)
    await desk.post("/lora-adapters", [{"id": 0, "scale": 0.5}])
    for slot in taken:
        desk.proxy.slots.release(slot)
    await completing
    assert not desk.keeper.may_restore[0]()
    assert not desk.keeper.may_keep[0]()


# case E5
async def test_what_a_request_with_other_adapters_may_have_computed_is_not_kept(desk: Desk) -> None:
    desk.begin()
    assert await desk.complete()
    assert not await desk.complete(OTHER_WAY)
    assert await desk.complete()
    assert [may_keep() for may_keep in desk.keeper.may_keep] == [False, True]


@pytest.mark.parametrize("desk", [()], indirect=True)
async def test_without_adapters_there_are_no_others(desk: Desk) -> None:
    desk.begin()
    assert await desk.complete()
    assert not await desk.complete(OTHER_WAY)
    assert desk.keeper.may_keep[0]()


# case E5
async def test_adapters_that_are_changed_while_the_weights_are_read_leave_it_without_snapshots(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def name(*_arguments: object) -> str:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(changed.wait(), loop).result(30)
        return "named by what was true before"

    monkeypatch.setattr(serve, "_name", name)
    beginning = asyncio.create_task(desk.begin_keeping(tmp_path))
    await asyncio.wait_for(asked.wait(), 30)
    await desk.post("/lora-adapters", [{"id": 0, "scale": 0.5}])
    changed.set()
    await beginning
    assert desk.proxy.keeper is None
    assert "adapters" in desk.proxy.why_not


async def test_whatever_fails_at_the_start_is_said(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def name(*_arguments: object) -> str:
        raise RuntimeError("no home")

    monkeypatch.setattr(serve, "_name", name)
    await desk.begin_keeping(tmp_path)
    assert desk.proxy.why_not == "RuntimeError: no home"
    assert "no snapshots" in caplog.text


async def test_a_server_that_does_not_say_what_it_loaded_is_warned_of_once(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    statuses = [503, 401, 401, 200]
    why_not = []

    async def answer(_path: str, _body: object = None) -> tuple[int, object]:
        why_not.append(desk.proxy.why_not)
        desk.server.props_status = statuses.pop(0)
        return await Proxy.answer(desk.proxy, "/props")

    monkeypatch.setattr(desk.proxy, "answer", answer)
    monkeypatch.setattr(serve, "_name", lambda *_arguments: "named")
    await desk.begin_keeping(tmp_path)
    assert ["401" in one for one in why_not] == [False, False, True, True]
    assert caplog.text.count("401") == 1
    assert desk.proxy.why_not == ""
    assert desk.proxy.keeper is not None
    desk.proxy.keeper.close()
