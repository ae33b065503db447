"""A real terminal: a program in tmux, whose screen a test reads, types into and resizes."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.wait import eventually


class Tmux:
    """One server of its own with one window; a context manager. `command` runs in a shell that stays afterwards."""

    def __init__(self, where: Path, command: list[str], *, width: int, height: int, **environ: str) -> None:
        self._socket = str(where / "tmux.sock")
        shown = "trap : INT; " + shlex.join(command) + '; echo "exit code $?"; exec cat'
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TMUX", "LC_", "COLUMNS"))}
        self._environ = {**kept, "LC_ALL": "C.UTF-8", "TERM": "screen-256color"}
        # The terminal's own locale decides what it can show; the program's is what the test says.
        inner = shlex.join(["env", *(f"{name}={value}" for name, value in environ.items()), "sh", "-c", shown])
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), inner)

    def _tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-u", *args],
            env=self._environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return done.stdout

    def screen(self) -> str:
        """What it shows, without blanks at the ends of lines."""
        return "".join(line.rstrip() + "\n" for line in self._tmux("capture-pane", "-p").splitlines())

    def shows(self, *texts: str) -> str:
        """The screen as soon as it has all of these."""
        eventually(lambda: all(text in self.screen() for text in texts), what=lambda: f"{texts} in\n{self.screen()}")
        return self.screen()

    def lacks(self, text: str) -> str:
        """The screen as soon as it has this no more."""
        eventually(lambda: text not in self.screen(), what=lambda: f"no {text!r} in\n{self.screen()}")
        return self.screen()

    def press(self, *keys: str) -> None:
        """Keys as tmux names them."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def has_other_screen(self) -> bool:
        """Whether a program has taken the alternate screen."""
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def has_cursor(self) -> bool:
        return self._tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def pid(self) -> int:
        """Of the shell in the window."""
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False, timeout=30)
