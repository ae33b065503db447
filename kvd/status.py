"""What `kvd status` knows: one typed snapshot, made by the daemon, read by commands, tests and any other client.

All sizes are bytes, all durations seconds, all counters count up from the daemon's start. Token counts are blocks
times the namespace's block_tokens.
"""

from __future__ import annotations

import msgspec


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    pass


class PoolStatus(_Part, frozen=True):
    """One pool: all segments of one tenant, one block size and one `[[pools]]` rule."""

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
    device: str = "host"
    """Where its memory is: "host", or a card's UUID."""
    staged_from: str = ""
    """The card's UUID when this is the host pool beside one, for clients that cannot map that card."""
    name: str = ""
    """Of the rule it was made for; empty without one."""
    block_map: str = ""
    """One letter of `BLOCK_LETTERS` a block, in the order of the ids, where it was asked for; see `map_step`."""
    map_step: int = 1
    """Each letter stands for the first of so many adjacent blocks: a large pool is sampled."""


class NamespaceStatus(_Part, frozen=True):
    """One namespace that somebody opened since the daemon started, in one pool: rules may give it several."""

    digest: str
    pool: int
    model: str
    engine: str
    adapter: str
    has_salt: bool
    block_tokens: int
    num_sealed: int
    counters: dict[str, int]
    positional: str = ""
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    computed_tokens: int = 0
    """Tokens whose computation clients have reported, with how long it took."""
    computed_s: float = 0.0


class SavingsStatus(_Part, frozen=True):
    """What sharing has saved. Tokens are counted; seconds are those that the clients' own rates come to."""

    num_tokens: int
    """Tokens that were found and so not computed."""
    num_tokens_rated: int
    """Those of them whose namespace somebody has reported the speed of."""
    prefill_s: float
    """Their number times computed_s / computed_tokens of their namespace."""


class MapStatus(_Part, frozen=True):
    """The segments of one pool that a session was given."""

    pool: int
    device: str
    mode: str
    """mapped; staged in the host pool that stands beside a card for processes that cannot map it."""
    num_segments: int
    nbytes: int
    num_to_close: int = 0
    """Segments that it was told to close and has not: the card's memory waits for it."""


class ClientStatus(_Part, frozen=True):
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
    maps: list[MapStatus] = []
    """The segments it can map, by pool."""
    mapped_nbytes: int = 0
    """Bytes of the segments whose memory it was given."""
    mode: str = "mapped"
    """How it gets at the blocks: mapped, its own address space shows the daemon's memory; staged, that of the host pool
    beside a card."""
    prefill_s_saved: float | None = None
    """See `SavingsStatus`; None as long as nobody has reported a speed."""


class MemoryStatus(_Part, frozen=True):
    """A device's byte budget. `device` is "host" for host shared memory, else the card's UUID."""

    device: str
    budget_nbytes: int
    used_nbytes: int
    """Bytes of segments that belong to a pool."""
    ready_nbytes: int
    """Bytes of segments made ahead and not yet given to a pool."""
    available_nbytes: int
    """What the machine, the cgroup or the card could still give."""
    draining_nbytes: int = 0
    """Bytes of a card's segments that left their pools, and that clients have not closed yet."""
    name: str = ""
    """The card's, as its maker calls it; this and what follows only for cards."""
    compute_capability: str = ""
    """As "6.1"."""
    total_nbytes: int = 0
    free_nbytes: int = 0
    """Of the whole card, as last measured."""
    reserved_nbytes: int = 0
    """What kvd leaves free for others."""
    state: str = "serving"
    """serving; lost: the card fell off the bus or broke; released: nobody used it, and it comes back when wanted."""
    reason: str = ""
    """Why it is lost."""


class TierUsage(_Part, frozen=True):
    """What a tier holds, as the tier itself says: never a sum kept beside it."""

    num_blocks: int
    used_nbytes: int
    """Bytes of the blocks as they are stored, headers and encoding included; whole segments for the host tier."""
    budget_nbytes: int
    """0 when the tier names no limit."""


class TierStatus(_Part, frozen=True):
    """One lower tier. Made without asking the tier anything, so it is there at once even when the tier is stuck."""

    name: str
    kind: str
    """host or redis."""
    address: str
    """Where it is, without secrets; empty for the host tier."""
    state: str
    """up, down (its circuit breaker is open) or probing (the first call after that is on its way)."""
    reason: str
    """Why it is down, with what to do; empty when it is up."""
    retry_in_s: float
    num_hits: int
    num_misses: int
    """Of gets, which ask only for what was found: misses are blocks that went in between."""
    num_puts: int
    num_deletes: int
    read_nbytes: int
    read_s: float
    """Time spent in gets that hit: read_nbytes / read_s is the bandwidth."""
    written_nbytes: int
    write_s: float
    errors: dict[str, int]
    """Counts by cause."""
    usage: TierUsage | None
    """As last measured; None before the first time."""
    usage_age_s: float
    details: dict[str, str]
    """Of the kind: server name and version, codec, and so on."""
    num_asked: int = 0
    """Blocks that were looked for here, since no nearer tier had them."""
    num_found: int = 0
    """Those of them that were here; num_found / num_asked is the tier's hit rate."""


class MoverStatus(_Part, frozen=True):
    """The threads that copy between the pools and the tiers below. `queued` and `running` are by rank of urgency."""

    num_threads: int
    num_threads_alive: int
    num_thread_restarts: int
    """Threads that died of a defect and were replaced."""
    queued: dict[str, int]
    running: dict[str, int]
    counters: dict[str, int]


class WaitStatus(_Part, frozen=True):
    """Requests that wait for the same thing."""

    what: str
    """computation (somebody else computes the block), promotion or answer (of a tier below), blocks, or memory."""
    pool: int
    """-1 where it concerns none."""
    hash: str
    """Of the block that is waited for; empty when it is none in particular."""
    waiting: list[int]
    """Sessions, first come first."""
    writer: int
    """The session that computes it; 0 when that is no session."""
    left_s: float
    """Until the last of them stops waiting."""


class PinStatus(_Part, frozen=True):
    """A prompt that is kept resident."""

    pin: str
    """Its name, for `kvd pin --remove`."""
    label: str
    uid: int
    tenant: str
    model: str
    pool: int
    num_tokens: int
    """Of its full blocks."""
    num_tokens_resident: int
    held_nbytes: int
    is_lasting: bool
    """Whether it outlives the daemon: on disk, or about to be."""


BLOCK_LETTERS = {
    ".": "free",
    "w": "reserved by a writer",
    "f": "being filled from below",
    "u": "in use",
    "c": "cached",
    "b": "cached, with a copy below",
    "-": "in a segment that is being given up",
}
"""What the letters of `PoolStatus.block_map` stand for."""


class Snapshot(_Part, frozen=True):
    """Everything at one moment."""

    version: str
    pid: int
    epoch: int
    uptime_s: float
    runtime_dir: str
    memory: MemoryStatus
    """Of the main device."""
    pools: list[PoolStatus]
    namespaces: list[NamespaceStatus]
    clients: list[ClientStatus]
    counters: dict[str, int]
    """Of the server: requests, bad frames, unknown tokens, stalls, and so on."""
    warnings: list[str]
    """One sentence each, with what to do."""
    tiers: list[TierStatus] = []
    """The tiers below the pools, nearest first."""
    mover: MoverStatus | None = None
    """None when there is no tier below."""
    memories: list[MemoryStatus] = []
    """Of every device, the main one first."""
    tenant: str = ""
    """Whose things these are, where the asker may see no others (isolation by uid); empty when everything is there.

    Then figures that count over all tenants are 0 or absent, the tiers' among them.
    """
    num_namespaces_omitted: int = 0
    """Namespaces left out of `namespaces`, which names those with most sealed blocks."""
    savings: SavingsStatus = SavingsStatus(num_tokens=0, num_tokens_rated=0, prefill_s=0.0)
    """Of all clients since the daemon's start."""
    waits: list[WaitStatus] = []
    pins: list[PinStatus] = []
