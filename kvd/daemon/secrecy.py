"""Keeps the daemon's memory to itself: prompts lie in it as keys and values, and perhaps a password."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

_PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """No core dump of this process, nor of the servers it starts, and no other process of the same user reads it.

    Not dumpable means that /proc/PID/mem, fd, maps and environ belong to root, and that ptrace(2) and pidfd_getfd(2)
    are refused; only this process itself, and root, still get at them. A program that this one starts is dumpable
    again from its execve(2) on, but inherits the limit and the filter of its dumps. Never raises: a kernel without one
    of the three has the others.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A core_pattern that is a pipe ignores the limit. Before the next line: afterwards the file is root's.
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
