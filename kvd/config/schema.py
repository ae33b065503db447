"""What can be configured: one Struct a section, every field with its type, range, default and description.

The descriptions are the reference: `kvd serve --help`, `kvd config show` and CONFIG.md are made from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.block import PAGE_NBYTES

SIZE = {"unit": "bytes"}
"""Marks a field whose text value is a size (`kvd.config.sizes`)."""

SECONDS = {"unit": "seconds"}

MAX_BUDGET_NBYTES = 1 << 50

Auto = Literal["auto"]
BudgetSize = Annotated[int, Meta(ge=PAGE_NBYTES, le=MAX_BUDGET_NBYTES)]
SegmentSize = Annotated[int, Meta(ge=PAGE_NBYTES, le=1 << 40, multiple_of=PAGE_NBYTES)]
QuotaSize = Annotated[int, Meta(ge=0, le=MAX_BUDGET_NBYTES)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The byte budget for KV blocks and how its memory is made."""

    budget: Annotated[
        BudgetSize | Auto,
        Meta(
            description="Memory for all pools together; auto is half of what the machine or the cgroup has available "
            "at start.",
            extra=SIZE,
        ),
    ] = "auto"
    segment: Annotated[
        SegmentSize | Auto,
        Meta(
            description="Size of one segment, the unit in which pools grow and shrink; a multiple of 4096 and at least "
            "one block. auto chooses by the budget.",
            extra=SIZE,
        ),
    ] = "auto"
    prefault: Annotated[
        Literal["background", "lazy"],
        Meta(
            description="background makes segments ahead of need, up to the budget; lazy makes one when a pool asks "
            "for it."
        ),
    ] = "background"
    checksums: Annotated[
        bool,
        Meta(description="Ask writers for a checksum of each block they seal, so that readers can verify it."),
    ] = False
    huge_pages: Annotated[
        Literal["auto", "off"],
        Meta(description="auto advises transparent huge pages where blocks are multiples of 2 MiB."),
    ] = "auto"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Who may connect, and between whom the wall stands."""

    isolation: Annotated[
        Literal["group", "uid"],
        Meta(
            description="Tenants: group lets all users who may connect share blocks, uid keeps each user's blocks to "
            "that user."
        ),
    ] = "group"
    group: Annotated[
        str,
        Meta(
            description="Group that may connect, by name; empty allows only the daemon's own user and root.",
            max_length=256,
        ),
    ] = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one session or user may hold; protects the others from one that floods."""

    session_nbytes: Annotated[
        QuotaSize, Meta(description="Most bytes of blocks that one session may hold; 0 is no limit.", extra=SIZE)
    ] = 0
    uid_nbytes: Annotated[
        QuotaSize,
        Meta(description="Most bytes of blocks that all sessions of one user may hold; 0 is no limit.", extra=SIZE),
    ] = 0
    credits: Annotated[
        Annotated[int, Meta(ge=1, le=4096)], Meta(description="Requests that one session may have in flight.")
    ] = 64
    sessions: Annotated[Annotated[int, Meta(ge=1, le=65536)], Meta(description="Sessions at the same time.")] = 1024


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a begin may wait for a computation that another session announced."""

    default_s: Annotated[
        Seconds, Meta(description="Seconds a begin waits that names no bound of its own; 0 never waits.", extra=SECONDS)
    ] = 30.0
    max_s: Annotated[
        Seconds,
        Meta(description="Most seconds a begin may ask to wait; a greater bound is cut to it.", extra=SECONDS),
    ] = 300.0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon writes to stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe messages to write.")
    ] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration. `runtime_dir` is an absolute folder once loaded by `kvd.config.load`."""

    runtime_dir: Annotated[
        str,
        Meta(
            description="Folder of the sockets and the lock. Default: $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvd, else "
            "/run/kvd.",
            max_length=4096,
        ),
    ] = ""
    memory: Memory = Memory()
    access: Access = Access()
    limits: Limits = Limits()
    waits: Waits = Waits()
    log: Log = Log()
