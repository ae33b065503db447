"""Notices a peer that fills our memory with a message it never ends.

libzmq keeps the frames of a message until the last one is there, and bounds neither their number nor their sum: the
high-water mark counts whole messages, MAXMSGSIZE one frame. So a peer that speaks ZMTP by hand can send frames for
ever, and the loop never hears of it. What it does see is its own memory growing while somebody sends and sends, and
completes nothing.

What this cannot tell apart is a peer that sends slowly enough for libzmq always to have read everything. It grows our
memory at a few MiB a second at most, and `LimitAS=` or `MemoryMax=` of the unit are the last word.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from kvd.server.connections import Process, processes_with_unread_bytes

GROWTH_NBYTES = 64 << 20
"""Growth beyond the least since the last look that is looked into; the daemon's own is 300 bytes a block."""
NUM_TRIMS = 10
"""Heartbeats after a culprit was sent away at which freed memory is given back: libzmq frees it on its own thread."""
NUM_LOOKS = 3
"""Heartbeats in a row at which a process must have sent, and completed nothing, to be the culprit."""


def anonymous_nbytes() -> int:
    """Resident memory of this process that is neither a file's nor shared."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
    return (resident - shared) * resource.getpagesize()


def give_memory_back() -> None:
    """Has libc return what libzmq freed; it keeps it otherwise."""
    ctypes.CDLL(None).malloc_trim(0)


class MemoryGuard:
    """Call `look` at each heartbeat. Loop thread only."""

    def __init__(
        self,
        path: str,
        *,
        memory: Callable[[], int] = anonymous_nbytes,
        senders: Callable[[str], set[Process]] = processes_with_unread_bytes,
        give_back: Callable[[], None] = give_memory_back,
    ) -> None:
        """`path` of the ROUTER's socket."""
        self._path = path
        self._memory = memory
        self._senders = senders
        self._give_back = give_back
        self._accepted_nbytes = memory()
        self._suspects: dict[Process, int] = {}
        self._num_looks = 0
        self._num_trims = 0

    def look(self, num_messages: Mapping[Process, int]) -> set[Process]:
        """Processes to be sent away. `num_messages` is how many whole messages came from each, so far."""
        if self._num_trims:
            self._num_trims -= 1
            self._give_back()
        nbytes = self._memory()
        self._accepted_nbytes = min(self._accepted_nbytes, nbytes)
        if nbytes <= self._accepted_nbytes + GROWTH_NBYTES:
            self._suspects, self._num_looks = {}, 0
            return set()
        now = {process: num_messages.get(process, 0) for process in self._senders(self._path)}
        if self._num_looks:
            now = {process: count for process, count in now.items() if self._suspects.get(process) == count}
        self._suspects, self._num_looks = now, self._num_looks + 1
        if now and self._num_looks < NUM_LOOKS:
            return set()
        # Either it is them, or the growth is our own affair: it is not looked into again.
        self._accepted_nbytes, self._suspects, self._num_looks = nbytes, {}, 0
        self._num_trims = NUM_TRIMS if now else 0
        return set(now)
