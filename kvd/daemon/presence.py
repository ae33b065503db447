"""Whether what the daemon made in its runtime folder is still there, and still its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvd.server.endpoints import file_identity

LOOK_EVERY_S = 5.0
_log = logging.getLogger(__name__)


class FolderWatch:
    """Says once, in the log, that the lock or a socket was removed or replaced.

    The daemon goes on for the clients it has, but new ones cannot find it, and nothing keeps a second daemon from
    starting in its folder.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made: dict[Path, tuple[int, int] | None] = {}
        self._due_s = clock()

    def begin(self, paths: Sequence[Path]) -> None:
        """From now on these files are to stay as they are."""
        self._made = {path: file_identity(path) for path in paths}

    def end(self) -> None:
        """From now on they may go."""
        self._made = {}

    def look(self) -> None:
        """At each heartbeat; most of them cost a comparison, and every `LOOK_EVERY_S` one a stat a file."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_EVERY_S
        lost = [path for path, made in self._made.items() if file_identity(path) != made]
        if lost:
            self.end()
            _log.error(
                "%s: removed or replaced while this daemon serves; new clients may not find it, and another daemon "
                "can start there. Restart it, and keep whatever cleans up temporary files away from its folder",
                ", ".join(map(str, lost)),
            )
