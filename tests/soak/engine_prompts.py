"""What the engines of a soak are asked: what a document says, so that another document's KV gives another answer.

All documents have the same words at the same places and say something else with them: a wrong block, of which nothing
in the prompt tells that it is wrong, changes the answer.
"""

from __future__ import annotations

import random

NUM_NEW = 4
"""Tokens of an answer."""
BLOCK_TOKENS = 16
MIN_GAP = 0.5
"""By how much (natural logarithm of probability) the first choice must be ahead of the second one, at every token of an
answer: another split of the prompt, or another history of its prefix, changes the last bits and must not change it."""

_PLACES = ("Oslo", "Lima", "Cairo", "Paris", "Tokyo", "Rome", "Delhi", "Quito", "Berlin", "Madrid")
_THINGS = ("maple", "stone", "river", "copper", "bread", "silver", "paper", "glass", "apple", "cotton")
_ASKED = (3, 5)
_DOCUMENTS = (0, 13, 14)
"""Those about which SmolLM2-135M is sure of both answers, all of which are different."""


def texts() -> list[str]:
    """The prompts, two for each document: its lines, and some of them again up to a place. About 120 tokens."""
    return [_text(number, asked) for number in _DOCUMENTS for asked in _ASKED]


def _text(number: int, asked: int) -> str:
    things = list(_THINGS)
    random.Random(number).shuffle(things)
    lines = [f"The key of {place} is {thing}." for place, thing in zip(_PLACES, things, strict=True)]
    return "\n".join([f"Document {number}.", *lines, "", *lines[:asked], f"The key of {_PLACES[asked]} is"])
