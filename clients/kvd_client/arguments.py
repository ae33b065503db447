"""Numbers that a caller passes: checked in one place, before anything is asked of the daemon or changed here."""

from __future__ import annotations

import contextlib
import math
from operator import index
from typing import SupportsFloat, SupportsIndex

from kvd.errors import InvalidRequest

MAX_TOKENS = 2**32 - 1
"""More than any sequence can hold; below it no size in bytes wraps around."""
MAX_WAIT_S = 86_400.0
"""The daemon's own bound for a wait."""


def whole_number(what: str, value: SupportsIndex, *, least: int = 0, most: int | None = None) -> int:
    """`value` as an int: ints, and numpy's or torch's integers. Bools, floats, text and the like are refused.

    Raises `InvalidRequest`, naming `what`, for those and for what is outside `least` .. `most`.
    """
    number = value if type(value) is int else _as_int(what, value)
    if number < least or (most is not None and number > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{what} must be a whole number {bounds}, not {number}")
    return number


def _as_int(what: str, value: SupportsIndex) -> int:
    # A bool would pass for 0 or 1; numpy's and torch's say what they are by their dtype.
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        with contextlib.suppress(TypeError):
            return index(value)
    raise InvalidRequest(f"{what} must be a whole number, not {value!r}")


def seconds(what: str, value: SupportsFloat, *, most: float = MAX_WAIT_S) -> float:
    """`value` as a float from 0 to `most`. Raises `InvalidRequest`, for NaN, text and bools too."""
    number = math.nan
    if not isinstance(value, bool | str | bytes | bytearray):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not 0 <= number <= most:
        raise InvalidRequest(f"{what} must be from 0 to {most:g} seconds, not {value!r}")
    return number
