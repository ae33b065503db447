"""The terminal as `kvd top` uses it: the other screen, keys one by one, its size, and everything back at the end.

Only what any terminal since the VT100 understands, so that it works over ssh, in tmux and on a console.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import Self

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown",
    "\x1b[H": "home", "\x1b[1~": "home", "\x1bOH": "home", "\x1b[F": "end", "\x1b[4~": "end", "\x1bOF": "end",
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "esc",
}  # fmt: skip


class Terminal:
    """A context manager on stdin and stdout, which must be one terminal. Main thread only.

    `wake()` may be called from any thread and from signal handlers: it ends `keys`' wait.
    """

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = termios.tcgetattr(self._in)
        self._closing = contextlib.ExitStack()
        self.was_resized = False
        """The whole screen must be drawn anew; whoever does resets it."""

    def __enter__(self) -> Self:
        for number, handler in (
            (signal.SIGWINCH, self._on_resize),
            (signal.SIGTSTP, self._on_stop),
            (signal.SIGTERM, self._on_end),
            (signal.SIGHUP, self._on_end),
        ):
            self._closing.callback(signal.signal, number, signal.signal(number, handler))
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
        self._give_back()
        os.close(self._reader)
        os.close(self._writer)

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        rows, columns = termios.tcgetwinsize(self._in)
        return max(20, columns or 80), max(5, rows or 24)

    def show(self, lines: list[str]) -> None:
        """Draws the whole screen, one string a line, without clearing it first, so that nothing flickers."""
        start = "\x1b[2J\x1b[H" if self.was_resized else "\x1b[H"
        self.was_resized = False
        self._write(start + "\x1b[0m\x1b[K\r\n".join(lines) + "\x1b[0m\x1b[K")

    def keys(self, timeout_s: float) -> list[str]:
        """The keys that were pressed; waits until one is, `wake` is called, or the time is over."""
        ready, _, _ = select.select([self._in, self._reader], [], [], timeout_s)
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        if self._in not in ready:
            return []
        data = os.read(self._in, 4096)
        # A closed terminal gives nothing for ever: that is the end, too.
        return split_keys(data.decode("utf-8", "ignore")) if data else ["\x04"]

    def wake(self) -> None:
        """Ends a wait."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def _take(self) -> None:
        tty.setcbreak(self._in)
        self._write(_ENTER)
        self.was_resized = True

    def _give_back(self) -> None:
        # A terminal that is gone needs nothing back.
        with contextlib.suppress(OSError, termios.error):
            self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _on_resize(self, _number: int, _frame: FrameType | None) -> None:
        self.was_resized = True
        self.wake()

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its screen back, and we ours when it goes on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(OSError, termios.error):
            self._take()
        self.wake()

    def _on_end(self, number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)


def split_keys(text: str) -> list[str]:
    """The keys that a burst of input is: escape sequences by name, everything else by character."""
    found, at = [], 0
    while at < len(text):
        for length in (4, 3, 1):
            name = _NAMES.get(text[at : at + length])
            if name is not None and len(text[at : at + length]) == length:
                break
        else:
            length, name = 1, text[at]
        if name == "esc" and len(text) > at + 1 and text[at + 1] in "[O":
            # A sequence that we have no use for: up to its last character, which is a letter or a tilde.
            end = at + 2
            while end < len(text) and not (text[end].isalpha() or text[end] == "~"):
                end += 1
            at = end + 1
            continue
        found.append(name)
        at += length
    return found


def is_terminal() -> bool:
    """Whether stdin and stdout are terminals."""
    try:
        return os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())
    except (OSError, ValueError):
        return False


__all__ = ["Terminal", "is_terminal", "split_keys"]
