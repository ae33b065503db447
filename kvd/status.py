"""What `kvd status` knows: one typed snapshot, made by the daemon, read by commands, tests and any other client.

All sizes are bytes, all durations seconds, all counters count up from the daemon's start. Token counts are blocks
times the namespace's block_tokens.
"""

from __future__ import annotations

import msgspec


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    pass


class PoolStatus(_Part):
    """One pool: all segments of one tenant and one block size."""

    pool: int
    tenant: str
    block_nbytes: int
    num_segments: int
    num_segments_retiring: int
    num_free: int
    num_reserved: int
    num_filling: int
    num_sealed: int
    num_referenced: int
    """Sealed blocks with at least one reference; the other sealed ones may be evicted."""
    num_references: int
    counters: dict[str, int]


class NamespaceStatus(_Part):
    """One namespace that somebody opened since the daemon started."""

    digest: str
    pool: int
    model: str
    engine: str
    adapter: str
    has_salt: bool
    block_tokens: int
    num_sealed: int
    counters: dict[str, int]


class ClientStatus(_Part):
    """One session. `uid` and `pid` are the kernel's word, `label` is the client's."""

    session: int
    pid: int
    uid: int
    label: str
    client_version: str
    connected_s: float
    num_references: int
    num_reserved: int
    held_nbytes: int
    num_announced: int
    num_waiting: int
    tokens_saved: int
    num_requests: int
    stalled: bool


class MemoryStatus(_Part):
    """The device's byte budget. `device` is "host" for host shared memory."""

    device: str
    budget_nbytes: int
    used_nbytes: int
    """Bytes of segments that belong to a pool."""
    ready_nbytes: int
    """Bytes of segments made ahead and not yet given to a pool."""
    available_nbytes: int
    """What the machine, or the cgroup, could still give."""


class Snapshot(_Part):
    """Everything at one moment."""

    version: str
    pid: int
    epoch: int
    uptime_s: float
    runtime_dir: str
    memory: MemoryStatus
    pools: list[PoolStatus]
    namespaces: list[NamespaceStatus]
    clients: list[ClientStatus]
    counters: dict[str, int]
    """Of the server: requests, bad frames, unknown tokens, stalls, and so on."""
    warnings: list[str]
    """One sentence each, with what to do."""
