"""The daemon's side of the control page: made without leaving a name, written under a sequence lock."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import posix_ipc

from kvd.errors import OutOfMemory, RuntimeFolderError
from kvd.protocol.control_page import (
    BODY,
    BODY_OFFSET,
    CONTROL_PAGE_NBYTES,
    COUNTERS,
    HEAD,
    MAGIC,
    SEQUENCE,
    SEQUENCE_OFFSET,
    STATE,
    STATE_OFFSET,
    DaemonState,
)


class ControlPage:
    """One page of POSIX shared memory whose name is gone before anybody could open it.

    `read_only_fd` is what sessions get. Written by one thread only. A context manager; `close()` is idempotent and
    leaves the state STOPPED behind for those who still map the page.

    Raises `OutOfMemory` when /dev/shm is full, `RuntimeFolderError` when it cannot be used.
    """

    def __init__(self, *, epoch: int, pid: int | None = None) -> None:
        self.epoch = epoch
        self.pid = os.getpid() if pid is None else pid
        self.read_only_fd = -1
        self._sequence = 0
        descriptor = _nameless_page()
        try:
            self.read_only_fd = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            self._page = mmap.mmap(descriptor, CONTROL_PAGE_NBYTES, mmap.MAP_SHARED)
        except OSError as error:
            if self.read_only_fd >= 0:
                os.close(self.read_only_fd)
            raise _typed(error) from error
        finally:
            os.close(descriptor)
        HEAD.pack_into(self._page, 0, MAGIC, epoch, self.pid, 0)
        self.write(DaemonState.STARTING)

    def write(self, state: DaemonState, counters: Mapping[str, int] | None = None) -> None:
        """A heartbeat: the state, the time, the counters (those of `COUNTERS`, absent ones are 0)."""
        figures = counters or {}
        body = BODY.pack(time.monotonic_ns(), *(figures.get(name, 0) for name in COUNTERS))
        # Odd while the body changes; a reader that saw any of it in between starts over.
        SEQUENCE.pack_into(self._page, SEQUENCE_OFFSET, self._sequence + 1)
        STATE.pack_into(self._page, STATE_OFFSET, state, zlib.crc32(body))
        self._page[BODY_OFFSET : BODY_OFFSET + BODY.size] = body
        self._sequence += 2
        SEQUENCE.pack_into(self._page, SEQUENCE_OFFSET, self._sequence)

    def close(self) -> None:
        """Says STOPPED, then unmaps the page and closes its descriptor."""
        if self.read_only_fd < 0:
            return
        self.write(DaemonState.STOPPED)
        self._page.close()
        os.close(self.read_only_fd)
        self.read_only_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nameless_page() -> int:
    """A read-write descriptor of one allocated page of shared memory that has no name any more."""
    try:
        # Mode 0400: a session's read-only descriptor cannot be re-opened writable by another user.
        memory = posix_ipc.SharedMemory(f"/kvd-{secrets.token_hex(16)}", posix_ipc.O_CREX, mode=0o400, size=0)
    except (posix_ipc.Error, OSError) as error:
        raise _typed(error) from error
    descriptor: int = memory.fd
    try:
        memory.unlink()
        os.set_inheritable(descriptor, False)
        # Allocated, not only sized: on a full /dev/shm the first write would otherwise be a SIGBUS.
        os.posix_fallocate(descriptor, 0, CONTROL_PAGE_NBYTES)
    except (posix_ipc.Error, OSError) as error:
        os.close(descriptor)
        raise _typed(error) from error
    return descriptor


def _typed(error: Exception) -> OutOfMemory | RuntimeFolderError:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}:
        return OutOfMemory("POSIX shared memory is full: the control page needs 4 KiB; free some in /dev/shm")
    return RuntimeFolderError(f"POSIX shared memory cannot be used for the control page: {error}")
