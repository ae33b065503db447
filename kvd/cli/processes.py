"""What the operating system says about a client's process: its command and its own memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from kvd.status import Snapshot

CLOCK_SLACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """`private_nbytes` is resident memory that it shares with nobody, so without the blocks that it maps."""

    command: str
    private_nbytes: int | None


UNKNOWN = Process("", None)
"""It ended, or belongs to somebody whose processes we may not look at, or lives where we cannot see it."""


def process(pid: int, connected_s: float, now: float | None = None) -> Process:
    """The process behind a session that began `connected_s` ago. Never raises.

    A process younger than its session is another one that got the same pid.
    """
    try:
        found = psutil.Process(pid)
        if found.create_time() > (time.time() if now is None else now) - connected_s + CLOCK_SLACK_S:
            return UNKNOWN
        with found.oneshot():
            command = short_command(found.cmdline()) or found.name()
            memory = found.memory_info()
    except (psutil.Error, OSError):
        return UNKNOWN
    return Process(command, max(0, memory.rss - memory.shared))


def processes_of(snapshot: Snapshot) -> dict[int, Process]:
    """By pid, of all its clients."""
    return {client.pid: process(client.pid, client.connected_s) for client in snapshot.clients}


def short_command(argv: list[str]) -> str:
    """The command line without the folders of the program and of its first argument (an interpreter's script)."""
    return " ".join([*map(os.path.basename, argv[:2]), *argv[2:]])
