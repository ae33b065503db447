"""Waiting for a real condition of another process or thread, without sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def eventually(
    condition: Callable[[], _Value], timeout_s: float = 30.0, *, what: Callable[[], str] | None = None
) -> _Value:
    """The first true value of `condition`; fails when there is none in time, saying `what` was not."""
    deadline_s = time.monotonic() + timeout_s
    tick = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what() if what else condition}")
        tick.wait(0.01)
    return value
