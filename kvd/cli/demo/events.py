"""What a worker process tells the demo: one JSON object a line on its standard output.

It goes `Loading`... `Ready`, waits for the line "ask", tells `Answered`, waits for "check", tells `Checked`, and ends
on "stop" or the end of its standard input.
"""

from __future__ import annotations

import msgspec


class _Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class Loading(_Event, frozen=True):
    """`num_done` of `num_stages` are done; `stage` is under way."""

    stage: str
    num_done: int
    num_stages: int


class Ready(_Event, frozen=True):
    """The model is loaded; the session with the daemon stands."""

    session: int
    num_prompt_tokens: int


class Answered(_Event, frozen=True):
    """The question was answered. Times run from before the daemon was asked."""

    num_cached_tokens: int
    num_copied_bytes: int
    attach_s: float
    """Until the cached prefix was mapped; with single flight, the wait for it included."""
    first_token_s: float
    text: str


class Checked(_Event, frozen=True):
    """The same prompt without kvd: a plain DynamicCache, the prompt cut at the same place."""

    first_token_s: float
    is_equal: bool
    """All token ids, not only their text."""


Event = Loading | Ready | Answered | Checked

_decoder = msgspec.json.Decoder(Event)
_encoder = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    """One line."""
    return _encoder.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    """The event of a line. Raises `msgspec.DecodeError`."""
    return _decoder.decode(line)
