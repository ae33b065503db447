"""Which requests of a llama-server are completions, and which tokens their prompts come to."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvd.errors import InvalidTokens
from kvd.hashing import encode_tokens

Ask = Callable[[str, Any], Awaitable[Any]]
"""`ask(path, body)` posts JSON to the server and gives the JSON it answers, None for an error."""

COMPLETIONS: Final = frozenset({"/completion", "/completions", "/v1/completions"})
CHATS: Final = frozenset({"/chat/completions", "/v1/chat/completions"})
MIN_TEXT_NBYTES: Final = 256
"""Below that a prompt is computed sooner than anybody is asked about it."""


def parse(path: str, body: bytes) -> dict[str, Any] | None:
    """The request, if snapshots can help it: a completion of one prompt of text, computed by the model as it is.

    None for everything else, which goes to the server as it came.
    """
    if path not in COMPLETIONS | CHATS or len(body) < MIN_TEXT_NBYTES:
        return None
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict) or not body.lstrip().startswith(b"{"):
        return None
    if request.get("cache_prompt") is False or request.get("lora") or "id_slot" in request:
        return None
    several = (request.get("n"), request.get("n_cmpl"))
    return None if any(count not in {None, 1} for count in several) else request


async def tokens_of(path: str, request: dict[str, Any], ask: Ask) -> bytes | None:
    """The prompt's token ids, encoded, as the server itself sees them; None when that cannot be known.

    They only choose a snapshot. The server compares a snapshot's tokens with those of the prompt once more.
    """
    prompt = request.get("prompt")
    if path in CHATS:
        if not _is_text(request.get("messages")):
            return None
        templated = await ask("/apply-template", request)
        prompt = templated.get("prompt") if isinstance(templated, dict) else None
    if isinstance(prompt, str):
        asked = {"content": prompt, "add_special": True, "parse_special": True}
        answer = await ask("/tokenize", asked)
        prompt = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        return None
    try:
        return encode_tokens(prompt)
    except InvalidTokens:
        return None


def _is_text(messages: object) -> bool:
    """Whether no message has a picture or sound in it."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def with_slot(body: bytes, slot: int) -> bytes:
    """The same request for one slot; every byte of it stays as the client wrote it."""
    start = body.index(b"{") + 1
    return body[:start] + b'"id_slot":%d,' % slot + body[start:]
