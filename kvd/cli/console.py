"""The terminal: where to write, how wide, with colour or without.

rich honours NO_COLOR, TERM=dumb and pipes by itself. What it cannot know is that a stream in another encoding than
UTF-8 must not fail on a character it lacks.
"""

from __future__ import annotations

import io
import sys

from rich.console import Console

PIPE_WIDTH = 100
"""Columns where nobody has any: a pipe, a file."""


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that never raises UnicodeEncodeError."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    made = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not made.is_terminal and "COLUMNS" not in made._environ:
        made.width = PIPE_WIDTH
    return made
