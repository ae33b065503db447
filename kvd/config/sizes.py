"""Sizes as people write them ("4GiB", "1.5 GB", "65536") <-> bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from kvd.errors import ConfigError

_BINARY = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30, "T": 40, "KIB": 10, "MIB": 20, "GIB": 30, "TIB": 40}
_DECIMAL = {"KB": 3, "MB": 6, "GB": 9, "TB": 12}
_SHAPE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size. KiB, MiB, GiB, TiB (and K, M, G, T) count in 1024, KB, MB, GB, TB in 1000; case is ignored.

    Raises `ConfigError` when the text is not a size, or not a whole number of bytes.
    """
    match = _SHAPE.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or (unit not in _BINARY and unit not in _DECIMAL):
        raise ConfigError(f"{text!r} is not a size; write it like 4GiB, 512MiB or 65536")
    scale = 10 ** _DECIMAL[unit] if unit in _DECIMAL else 1 << _BINARY[unit]
    nbytes = Fraction(match[1]) * scale
    if nbytes.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest binary unit that is exact for the value, so that `parse_size` gives the same bytes back."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes}B"
