"""The facts that `kvd doctor` judges, and what a judgement is.

Levels: ok; note, worth knowing; warning, slower or less safe than it could be; error, something does not work.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from kvd.status import Snapshot

UNLIMITED = -1


class Level(enum.IntEnum):
    """How bad a finding is; the worst one decides the exit code."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


class Finding(msgspec.Struct, frozen=True):
    """One line of the result. `fix` is empty when there is nothing to do."""

    check: str
    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One NVIDIA card as the driver shows it."""

    name: str
    uuid: str
    total_nbytes: int
    compute_capability: tuple[int, int]
    drives_display: bool = False
    unproven: str = ""
    """Why its memory is not shared between processes here; empty when it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The torch of this environment. `arches` is None where it was not asked (it takes seconds)."""

    version: str
    cuda: str = ""
    arches: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """The running daemon, as it says and as the kernel shows it. What may not be looked at is None."""

    snapshot: Snapshot
    uid: int | None = None
    pid_namespace: str = ""
    memlock_nbytes: int | None = None
    """Soft limit; `UNLIMITED` for none."""
    max_descriptors: int | None = None
    integrity: str = ""
    """What is wrong with its pools; empty when nothing is, or it was not asked."""
    integrity_was_checked: bool = False
    num_verified: int | None = None
    num_unchecked: int = 0
    num_corrupt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the checks look at. Sizes in bytes; None is not known, or not there."""

    uid: int = 0
    version: str = ""
    runtime_dir: str = ""
    runtime_dir_problem: str = ""
    """Why no client can get at the sockets there; empty when it can, or nothing is there."""
    daemon: DaemonFacts | None = None
    daemon_problem: str = ""
    """Why the daemon did not answer; empty when it did."""
    pid_namespace: str = ""
    max_map_count: int | None = None
    max_descriptors: int | None = None
    memlock_nbytes: int | None = None
    transparent_huge_pages: str = ""
    """The chosen one of always, madvise, never."""
    num_huge_pages_free: int | None = None
    num_huge_pages: int | None = None
    overcommit_memory: int | None = None
    shm_problem: str = ""
    shm_free_nbytes: int | None = None
    has_nvidia_module: bool = False
    driver_branch: int | None = None
    """The first part of the driver's version, 580 for 580.95.05."""
    driver_problem: str = ""
    cards: tuple[Card, ...] = ()
    torch: TorchBuild | None = None
    redis_server: str = ""
    """Which binary an embedded server would run."""
    redis_server_problem: str = ""
    config_problem: str = ""
    redis_url: str = ""
    """As configured, without a password."""
    remove_ipc: bool | None = None
    lingers: bool | None = None
    """Whether the daemon's user keeps running after the last logout."""
    has_systemd: bool = False
