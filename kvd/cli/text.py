"""Numbers and foreign text as people read them in a terminal. Pure functions."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """The text with every control character replaced: a client's label must not steer the terminal that shows it."""
    return "".join(char if char.isprintable() else "?" for char in text)


def one_line(text: str) -> str:
    """The text without line breaks, runs of blanks and control characters."""
    return printable(" ".join(text.split()))


def size(nbytes: int) -> str:
    """Three digits or so and a binary unit: 512 B, 1.5 MiB, 16 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 1 if unit and value < 99.95 and round(value, 1) != int(round(value, 1)) else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def count(number: int) -> str:
    """A count with its thousands set apart: 1,048,576."""
    return f"{number:,}"


def duration(seconds: float) -> str:
    """The two greatest units: 42 s, 3 min 05 s, 2 h 07 min, 12 d 03 h."""
    whole = max(0, int(seconds))
    for unit, step, lesser, fraction in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= step:
            return f"{whole // step} {unit} {whole % step // fraction:02d} {lesser}"
    return f"{whole} s"


def percent(part: int, whole: int) -> str:
    """A share in whole percent, "-" of nothing; 100 % and 0 % are said only where they are exact."""
    if not whole:
        return "-"
    share = round(100 * part / whole)
    if share == 100 and part != whole:
        share = 99
    if share == 0 and part:
        share = 1
    return f"{share} %"
