"""What can be configured: one Struct a section, every field with its type, range, default and description.

The descriptions are the reference: `kvd serve --help`, `kvd config show` and CONFIG.md are made from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.block import PAGE_NBYTES
from kvd.config.pool_rule import TEXT, AfterPromote, PoolRule, SpillPolicy

SIZE = {"unit": "bytes"}
"""Marks a field whose text value is a size (`kvd.config.sizes`)."""

SECONDS = {"unit": "seconds"}

SECRET = {"secret": True}
"""Marks a text that may hold a password: it is shown by `kvd.config.secrets.redacted` only."""

MAX_BUDGET_NBYTES = 1 << 50

Auto = Literal["auto"]
BudgetSize = Annotated[int, Meta(ge=PAGE_NBYTES, le=MAX_BUDGET_NBYTES)]
SegmentSize = Annotated[int, Meta(ge=PAGE_NBYTES, le=1 << 40, multiple_of=PAGE_NBYTES)]
QuotaSize = Annotated[int, Meta(ge=0, le=MAX_BUDGET_NBYTES)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
WaitSeconds = Annotated[float, Meta(ge=0, le=600)]
"""A client gives up on a daemon that does not answer only after the longest wait it may have been configured with."""
RedisSize = Annotated[int, Meta(ge=8 << 20, le=MAX_BUDGET_NBYTES)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory beside a card: for processes that cannot map the card, and for caches that ask for "host"."""

    budget: Annotated[
        QuotaSize | Auto,
        Meta(
            description="Memory for these pools together, made only as it is needed; auto is a quarter of what the "
            "machine or the cgroup has available at start, at most 8GiB; 0 is none.",
            extra=SIZE,
        ),
    ] = "auto"


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The byte budget for KV blocks and how its memory is made."""

    device: Annotated[
        Annotated[str, Meta(pattern=r"\A(auto|cpu|cuda:.{1,64})\Z")],
        Meta(
            description="Where pools live: cpu is host memory; cuda:0 (a number as this process counts) or "
            "cuda:GPU-... (a UUID, or its beginning) is that card; auto is the card with the most memory that drives "
            "no display, else host memory.",
            extra={TEXT: "auto, cpu, or cuda: and the number or UUID of a card"},
        ),
    ] = "auto"
    reserve_nbytes: Annotated[
        QuotaSize, Meta(description="Memory of a card that is left free for its other users.", extra=SIZE)
    ] = 512 << 20

    budget: Annotated[
        BudgetSize | Auto,
        Meta(
            description="Memory for all pools together; auto is a quarter of what the card, or the machine or the "
            "cgroup, has available at start, at most 8GiB.",
            extra=SIZE,
        ),
    ] = "auto"
    segment: Annotated[
        SegmentSize | Auto,
        Meta(
            description="Size of one segment, the unit in which pools grow and shrink; a multiple of 4096 (on a card "
            "it is rounded up to whole 2MiB) and at least one block. auto chooses by the budget.",
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
        Meta(
            description="Keep the checksums that writers give of the blocks they seal, so that readers can verify them."
        ),
    ] = False
    huge_pages: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto takes huge pages that are set aside (vm.nr_hugepages) for blocks of whole 2 MiB, and "
            "has the kernel make transparent ones else, as far as it can; off leaves all memory in plain pages."
        ),
    ] = "auto"
    idle_release_s: Annotated[
        Seconds,
        Meta(
            description="Seconds after which a card that no session has a cache on is given up: its blocks are copied "
            "down, memory and context freed, and both come back when a cache is opened there. 0 keeps it.",
            extra=SECONDS,
        ),
    ] = 0.0
    host: HostMemory = HostMemory()


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Who may connect, and between whom the wall stands."""

    isolation: Annotated[
        Literal["group", "uid"],
        Meta(
            description="Tenants: group lets all users who may connect share blocks, uid keeps each user's blocks, "
            "names and figures to that user (root and the daemon's own user see all)."
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
    pinned: Annotated[
        Fraction, Meta(description="Share of the memory budget that pinned prompts may take in all; 0 allows none.")
    ] = 0.5
    credits: Annotated[
        Annotated[int, Meta(ge=1, le=4096)], Meta(description="Requests that one session may have in flight.")
    ] = 64
    sessions: Annotated[Annotated[int, Meta(ge=1, le=65536)], Meta(description="Sessions at the same time.")] = 1024
    uid_sessions: Annotated[
        Annotated[int, Meta(ge=0, le=65536)], Meta(description="Sessions of one user at the same time; 0 is no limit.")
    ] = 0
    uid_requests: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20)],
        Meta(description="Requests that all sessions of one user may have in flight; 0 is no limit."),
    ] = 0


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a begin may wait for a computation that another session announced."""

    default_s: Annotated[
        WaitSeconds,
        Meta(description="Seconds a begin waits that names no bound of its own; 0 never waits.", extra=SECONDS),
    ] = 30.0
    max_s: Annotated[
        WaitSeconds,
        Meta(description="Most seconds a begin may ask to wait; a greater bound is cut to it.", extra=SECONDS),
    ] = 300.0


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    """Host RAM below the pools, mapped by no client. Lost when the daemon stops."""

    budget: Annotated[
        QuotaSize,
        Meta(description="Bytes of blocks kept here, least recently used out first; 0 is off.", extra=SIZE),
    ] = 0


class RedisTier(msgspec.Struct, frozen=True, kw_only=True):
    """Redis or Valkey below the pools and the host tier: kvd's own server, or any other."""

    url: Annotated[
        str,
        Meta(
            description='"embedded" starts a server of kvd\'s own on a private socket; "" or "off" is none; else '
            "unix:///path, redis://host:port, rediss://host:port, redis+cluster://host:port,host:port.",
            max_length=4096,
            extra=SECRET,
        ),
    ] = "embedded"
    password_file: Annotated[
        str,
        Meta(description="File whose first line is the password; else $KVD_REDIS_PASSWORD.", max_length=4096),
    ] = ""
    password_env: Annotated[str, Meta(description="Environment variable that holds the password.", max_length=256)] = ""
    ttl_s: Annotated[
        Annotated[int, Meta(ge=1, le=365 * 86400)],
        Meta(description="Seconds that a block stays after its last use.", extra=SECONDS),
    ] = 3600
    prefix: Annotated[
        Annotated[str, Meta(pattern=r"\A[A-Za-z0-9:_.\-]{0,64}\Z")],
        Meta(
            description="Begins every key; daemons that are to share blocks use the same one. Letters, digits and "
            ": _ . - only.",
            extra={TEXT: "text of at most 64 letters, digits and : _ . -"},
        ),
    ] = "kvd:"
    codec: Annotated[
        Literal["raw", "lz4", "zstd"],
        Meta(description="How blocks are written; each codec is read. lz4 and zstd need the extra [codecs]."),
    ] = "raw"
    budget: Annotated[
        RedisSize | Auto,
        Meta(
            description="Memory of the embedded server; auto is a third of what the pools leave available at start, "
            "at most 8GiB.",
            extra=SIZE,
        ),
    ] = "auto"
    persistence: Annotated[
        str,
        Meta(
            description="Folder in which the embedded server keeps its blocks when the daemon stops; empty keeps none. "
            "Default: redis in $STATE_DIRECTORY, which systemd sets for the service, else none.",
            max_length=4096,
        ),
    ] = ""


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """Where blocks live that fall out of the pools, and when they are copied there."""

    spill: Annotated[
        SpillPolicy,
        Meta(
            description="on_evict copies the coldest blocks down before they must go, write_through each block as soon "
            "as it is sealed, on_second_hit blocks that were found twice."
        ),
    ] = "on_evict"
    after_promote: Annotated[
        AfterPromote, Meta(description="Whether the lower copy stays when a block comes back up.")
    ] = "retain"
    low_watermark: Annotated[
        Fraction,
        Meta(description="Spilling begins when less than this share of a pool can be given without losing a block."),
    ] = 0.1
    high_watermark: Annotated[Fraction, Meta(description="And ends when this share can.")] = 0.2
    drain_s: Annotated[
        Seconds,
        Meta(
            description="Most seconds that a clean stop copies blocks down, most recently used first; 0 copies none.",
            extra=SECONDS,
        ),
    ] = 10.0
    host: HostTier = HostTier()
    redis: RedisTier = RedisTier()


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures for Prometheus; METRICS.md lists them."""

    listen: Annotated[
        str,
        Meta(
            description="Where they may be fetched: 127.0.0.1:PORT, [::1]:PORT or unix:///PATH; empty is nowhere. "
            "Needs the extra [metrics].",
            max_length=256,
        ),
    ] = ""


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
            min_length=1,
            max_length=4096,
            extra={TEXT: "text, the path of a folder"},
        ),
    ] = ""
    memory: Memory = Memory()
    access: Access = Access()
    limits: Limits = Limits()
    waits: Waits = Waits()
    tiers: Tiers = Tiers()
    pools: tuple[PoolRule, ...] = ()
    """The `[[pools]]` tables of the file, which have no variable and no flag; checked by `kvd.config.read_pools`."""
    metrics: Metrics = Metrics()
    log: Log = Log()
