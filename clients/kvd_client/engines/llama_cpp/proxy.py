"""The HTTP proxy before a llama-server: every request passes through unchanged, completions through the slot keeper."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvd_client.engines.llama_cpp.arguments import Arguments
from kvd_client.engines.llama_cpp.keeper import Keeper
from kvd_client.engines.llama_cpp.prompts import CHATS, COMPLETIONS, parse, tokens_of, with_slot
from kvd_client.engines.llama_cpp.slots import Slot, Slots

STATUS_PATH: Final = "/kvd/status"
ASK_BOUND_S: Final = 30.0
"""For what the proxy itself asks: a template, tokens, a slot's state."""
_NO_SLOT: Final = frozenset(
    {
        *("/tokenize", "/detokenize", "/apply-template", "/props", "/lora-adapters", "/v1/messages/count_tokens"),
        *("/v1/chat/completions/control", "/chat/completions/control", "/v1/streams/lookup", "/tools", "/cors-proxy"),
    }
)
"""Posts that compute nothing in a slot. Any other does, for all we know."""
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_TAIL_NBYTES: Final = 4096
_TIMINGS: Final = re.compile(rb'(?<!\\)"cache_n":(\d+),"prompt_n":(\d+),"prompt_ms":([0-9.eE+-]+)')
_log = logging.getLogger(__name__)


class Proxy:
    """Of one server, which listens on a unix socket. `keeper` comes when the model is known, or never."""

    def __init__(self, socket_path: Path, arguments: Arguments) -> None:
        self.keeper: Keeper | None = None
        self.slots = Slots(0)
        self.why_not = arguments.why_not or "the model is being loaded"
        """Why there are no snapshots; empty when there are."""
        self.are_adapters_changed = False
        """Since the server was started; then its options do not say any more what a state depends on."""
        self._num_past = 0
        """Requests under way that took a slot without asking us."""
        self._has_adapters = any("lora" in option.lower() for option in arguments.identity)
        self._num_foreign = 0
        """Requests so far that may have left in any slot what other adapters computed, under the same tokens."""
        self._arguments = arguments
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket_path), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.app = web.Application(client_max_size=0)
        self.app.router.add_get(STATUS_PATH, self._status)
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    async def close(self) -> None:
        """Ends the connections to the server."""
        await self._session.close()

    async def ask(self, path: str, body: Any = None) -> Any:
        """JSON from the server itself, None for any error."""
        status, answer = await self.answer(path, body)
        return answer if status == 200 else None

    async def answer(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The server's own status, 0 when there is no answer, and what it says where that is JSON."""
        status = 0
        headers = {"Authorization": f"Bearer {self._arguments.api_key}"} if self._arguments.api_key else {}
        url = f"http://server{self._arguments.api_prefix}{path}"
        try:
            async with asyncio.timeout(ASK_BOUND_S):
                request = self._session.get if body is None else self._session.post
                options: dict[str, Any] = {} if body is None else {"json": body}
                async with request(url, headers=headers, **options) as response:
                    status = response.status
                    answer = await response.json(content_type=None)
                    if status != 200:
                        _log.debug("%s: %s %s", path, status, answer)
                    return status, answer
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            _log.debug("%s: %s", path, error)
        return status, None

    async def _status(self, _request: web.Request) -> web.Response:
        keeper = self.keeper
        return web.json_response(
            {
                "why_not": self.why_not,
                "name": "" if keeper is None else keeper.name,
                "slots": len(self.slots.all),
                "slots_taken": self.slots.num_taken,
                "counters": {} if keeper is None else dict(keeper.counters),
            }
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix(self._arguments.api_prefix)
        if request.method == "POST":
            if path in COMPLETIONS | CHATS and self.keeper is not None:
                return await self._complete(request, path, self.keeper)
            if path.startswith("/slots/"):
                if not self._arguments.slot_save_path:
                    return _NOT_SUPPORTED()
                self.slots.forget()
            elif path == "/lora-adapters":
                self._adapters_change()
            if path not in _NO_SLOT:
                return await self._past_us(request, request.content)
        return await self._pass_on(request, request.content if request.body_exists else None)

    async def _past_us(self, request: web.Request, body: bytes | aiohttp.StreamReader) -> web.StreamResponse:
        """A request that takes whichever slot the server likes; until it is over nobody knows which one is free."""
        self.slots.forget()
        self._num_past += 1
        self._num_foreign += self._has_adapters
        try:
            return await self._pass_on(request, body)
        finally:
            self._num_past -= 1
            self.slots.forget()

    def _adapters_change(self) -> None:
        """No more snapshots: what they are named after is no longer so. Those under way are given up."""
        self._num_foreign += 1
        self.are_adapters_changed = True
        self.keeper, self.why_not = None, "its adapters were changed while it ran"
        _log.warning("no snapshots any more: %s", self.why_not)

    async def _complete(self, request: web.Request, path: str, keeper: Keeper) -> web.StreamResponse:
        body = await _read(request)
        parsed = None if self._num_past else parse(path, body)
        tokens = None if parsed is None else await tokens_of(path, parsed, self.ask)
        # Naming a slot that one of those has would make this request wait for that one, though others were free.
        if tokens is None or self._num_past:
            return await self._past_us(request, body)
        num_foreign = self._num_foreign

        def is_ours() -> bool:
            return self._num_foreign == num_foreign

        slot, num_known = await self.slots.take(tokens)
        keeper.requests_changed()
        try:
            num_expected = await keeper.restore(slot, tokens, num_known, is_ours)
            tail = _Tail()
            response = await self._pass_on(request, with_slot(body, slot.number), tail)
            timings = tail.timings()
            keeper.completed(num_expected, num_known, timings)
            slot.tokens = tokens if response.status == 200 else b""
            prefill_s = 0.0 if timings is None else timings[2]
        except BaseException:
            slot.tokens = b""
            self._give_back(slot, keeper)
            raise
        self._give_back(slot, keeper)
        if response.status == 200:
            keeper.save_later(slot, tokens, prefill_s, is_ours)
        return response

    def _give_back(self, slot: Slot, keeper: Keeper) -> None:
        self.slots.release(slot)
        keeper.requests_changed()

    async def _pass_on(
        self, request: web.Request, body: bytes | aiohttp.StreamReader | None, tail: _Tail | None = None
    ) -> web.StreamResponse:
        """The request as it came to the server, and its answer as it comes to the client, piece by piece."""
        headers = _end_to_end(request.headers)
        for name in ("Content-Length", "Expect"):  # the proxy's own affair
            headers.popall(name, None)
        if isinstance(body, aiohttp.StreamReader) and request.content_length is not None:
            headers["Content-Length"] = str(request.content_length)
        headers.setdefault("Host", "server")
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(f"http://server{request.raw_path}", encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
            ) as answer:
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                response.headers.extend(_end_to_end(answer.headers))
                await response.prepare(request)
                async for piece in _pieces(answer):
                    if tail is not None:
                        tail.add(piece)
                    await response.write(piece)
                await response.write_eof()
                return response
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            if response is not None and response.prepared:
                # Half an answer went out: only the end of the connection says that there is no more.
                if request.transport is not None:
                    request.transport.abort()
                return response
            _log.debug("the server does not answer: %s", error)
            return _LOADING()


def _NOT_SUPPORTED() -> web.Response:  # noqa: N802
    return _error(501, "This server does not support slots action. Start it with `--slot-save-path`", "not_supported")


def _LOADING() -> web.Response:  # noqa: N802
    return _error(503, "Loading model", "unavailable")


def _error(status: int, message: str, kind: str) -> web.Response:
    """As the server words it."""
    body = {"error": {"code": status, "message": message, "type": f"{kind}_error"}}
    return web.json_response(body, status=status)


class _Tail:
    """The last bytes of an answer, where its timings are."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._nbytes = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._nbytes += len(piece)
        while self._nbytes - len(self._pieces[0]) >= _TAIL_NBYTES:
            self._nbytes -= len(self._pieces.popleft())

    def timings(self) -> tuple[int, int, float] | None:
        """Tokens taken from the slot, tokens computed, seconds that took; None when the answer does not say."""
        found = _TIMINGS.findall(b"".join(self._pieces))
        if not found:
            return None
        num_cached, num_computed, milliseconds = found[-1]
        return int(num_cached), int(num_computed), float(milliseconds) / 1000


async def _read(request: web.Request) -> bytes:
    parts = [part async for part in request.content.iter_any()]
    return b"".join(parts)


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in answer.content.iter_any():
        yield piece


def _end_to_end(headers: CIMultiDictProxy[str] | Mapping[str, str]) -> CIMultiDict[str]:
    """Without those that are about one connection."""
    kept: CIMultiDict[str] = CIMultiDict(headers)
    named = [name.strip().lower() for value in kept.getall("Connection", []) for name in value.split(",")]
    for name in {*_HOP_BY_HOP, *named}:
        kept.popall(name, None)
    return kept
