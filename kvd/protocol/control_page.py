"""The control page: one read-only page that tells every client which daemon this is and that it lives.

Little-endian, 4096 bytes:

    offset  type      field
         0  8 bytes   magic, b"KVDCTRL1"
         8  u64       epoch       } written once, before anybody sees the page
        16  u32       pid         }
        20  u32       zero
        24  u64       sequence: odd while the fields below are being written
        32  u32       state: 0 starting, 1 serving, 2 stopping, 3 stopped
        36  u32       crc32 (as zlib) of bytes 40 .. 39 + 8 * (1 + number of counters)
        40  u64       heartbeat, CLOCK_MONOTONIC in nanoseconds
        48  u64 each  counters, in the order of `COUNTERS`

A reader takes the sequence, the fields, and the sequence again; it starts over when the two differ or are odd, or
when the crc32 is wrong, for up to half a second. The checksum is there because neither side can place a memory
barrier from Python.
"""

from __future__ import annotations

import enum
import mmap
import struct
import time
import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvd.errors import DaemonUnavailable

CONTROL_PAGE_NBYTES = 4096
MAGIC = b"KVDCTRL1"
COUNTERS = ("num_sessions", "num_requests", "num_hit_blocks", "num_miss_blocks", "num_evicted_blocks", "used_nbytes")
"""What the page counts, in order; later versions append."""

HEAD = struct.Struct("<8sQII")
SEQUENCE = struct.Struct("<Q")
SEQUENCE_OFFSET = 24
STATE = struct.Struct("<II")
STATE_OFFSET = 32
BODY = struct.Struct(f"<{1 + len(COUNTERS)}Q")
BODY_OFFSET = 40
PATIENCE_S = 0.5
"""How long a write may seem to last, the writer being preempted, before a reader takes the daemon for dead."""


class DaemonState(enum.IntEnum):
    """Where the daemon is in its life."""

    STARTING = 0  # not yet answering
    SERVING = 1  # answering
    STOPPING = 2  # takes no new work
    STOPPED = 3  # gone, in good order; after a crash the page stays as it was


@dataclass(frozen=True, slots=True)
class ControlState:
    """What the page said at one moment."""

    state: DaemonState
    heartbeat_s: float
    """CLOCK_MONOTONIC, comparable with `time.monotonic()` on the same machine."""
    counters: dict[str, int]


class ControlPageReader:
    """A read-only map of the page, from the descriptor that came with the session's welcome.

    The caller keeps the descriptor. A context manager; `close()` is idempotent. Any thread may read.
    Raises `DaemonUnavailable` when the page is not one.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._page = mmap.mmap(descriptor, CONTROL_PAGE_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise DaemonUnavailable(f"the control page cannot be mapped: {error}") from error
        magic, self.epoch, self.pid, _ = HEAD.unpack_from(self._page)
        if magic != MAGIC:
            self._page.close()
            raise DaemonUnavailable(f"the control page begins with {magic!r}, not {MAGIC!r}")

    def read(self) -> ControlState:
        """The fields as of one moment. Raises `DaemonUnavailable` when the daemon died while it wrote them."""
        page = self._page
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            (before,) = SEQUENCE.unpack_from(page, SEQUENCE_OFFSET)
            state, checksum = STATE.unpack_from(page, STATE_OFFSET)
            body = page[BODY_OFFSET : BODY_OFFSET + BODY.size]
            (after,) = SEQUENCE.unpack_from(page, SEQUENCE_OFFSET)
            if before == after and not before % 2 and zlib.crc32(body) == checksum and state in _STATES:
                heartbeat_ns, *counters = BODY.unpack(body)
                return ControlState(DaemonState(state), heartbeat_ns / 1e9, dict(zip(COUNTERS, counters, strict=True)))
            if time.monotonic() >= give_up_s:
                raise DaemonUnavailable(f"the daemon (pid {self.pid}) stopped while it was writing its control page")
            # A write takes microseconds, so the writer was interrupted in the midst of one: let it have the processor.
            time.sleep(0.0002)

    def close(self) -> None:
        """Unmaps the page."""
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_STATES = frozenset(map(int, DaemonState))
