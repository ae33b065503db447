"""What a client asks, one class per request. Each is a msgpack array: tag, request_id, epoch, then the fields in order.

`request_id` is the client's own and comes back in the reply; `epoch` is the daemon's, from the session's welcome, and
a request with another is refused, so ids of an earlier daemon are never accepted. Newer fields go at the end with a
default; a decoder ignores what it does not know.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

RequestId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


COMPUTED_EARLIER_S = 1.0
"""How much longer than the session has lasted a computation that a `seal` reports may have taken: clocks tick."""


class _Request(msgspec.Struct, array_like=True, frozen=True, gc=False):
    request_id: RequestId
    epoch: int


class OpenCache(_Request, frozen=True, tag="open_cache"):
    """Names a namespace and its pool; answered by `CacheOpened`. Opening it again gives the same handle.

    `block_nbytes` is the client's own figure; the daemon refuses with `invalid-layout` when its own differs.

    `device` is where the pool shall be: "" as the daemon's rules say, "host", or a card's UUID; one that the daemon
    does not serve is refused with `cuda-unavailable`. `staged` says that this process cannot map device memory: where
    the pool would be on a card, the answer is a pool of host memory beside it, which the daemon fills from there.
    """

    model: str
    engine: str
    positional: str
    adapter: str
    salt: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    block_nbytes: int
    device: str = ""
    staged: bool = False


class Begin(_Request, frozen=True, tag="begin"):
    """References the longest resident prefix, reserves the rest, announces what will be computed; answered by `Begun`.

    `hashes` are the chain hashes of all full blocks of the prompt; at most the first `max_cached` are attached, so
    that one token at least is left to compute. `num_blocks` is how many blocks the sequence wants in all, so
    `num_blocks - cached` are reserved. With `announce`, the hashes not found are announced.

    `wait_s` bounds the wait for a computation another session announced, and for blocks that come up from the tiers
    below. None is the daemon's default, which is refused with `would-wait` when this session has announcements of its
    own, and gives up early on a tier that shows no progress. 0 never waits; what is below comes up for the next one.

    With `whole`, all `max_cached` blocks are attached or none, and nothing is reserved: `num_cached` then says how far
    the prefix reaches, and `blocks` is empty unless that is all of it.

    With `only_stores` the session has computed everything: what it finds here has spared it nothing, and counts neither
    as looked for nor as saved.
    """

    cache: int
    hashes: bytes
    max_cached: int
    num_blocks: int
    announce: bool = True
    wait_s: float | None = None
    with_checksums: bool = False
    whole: bool = False
    only_stores: bool = False


class Reserve(_Request, frozen=True, tag="reserve"):
    """Reserves `num_blocks` more blocks, all or none, never waiting for another session; answered by `Reserved`."""

    cache: int
    num_blocks: int


class Seal(_Request, frozen=True, tag="seal"):
    """Publishes written blocks under their hashes, all or none; answered by `Sealed`.

    Each reserved block becomes a sealed one that this session references once. Where the hash exists already, the reply
    names the existing block, which this session then references; its own copy stays reserved until released.
    `checksums` is empty or one xxh3-64 (little-endian u64) a block. `computed_tokens` and `computed_s` say, for the
    estimate of what sharing saves, how many tokens the sender has computed since its last seal and how long that took;
    0 and 0 when it does not know.
    """

    cache: int
    blocks: bytes
    hashes: bytes
    checksums: bytes = b""
    computed_tokens: int = 0
    computed_s: float = 0.0


class Retain(_Request, frozen=True, tag="retain"):
    """One more reference on each sealed block this session references already, and `num_blocks` new reservations.

    All or none; answered by `Reserved`. This is the daemon's part of a fork.
    """

    cache: int
    blocks: bytes
    num_blocks: int = 0


class Release(_Request, frozen=True, tag="release"):
    """Gives back one reference per entry of `blocks`, the reservations in `reserved`, the announcements in `hashes`.

    All or none. Answered by `Done` only with `ack`; without it an error is counted and nothing comes back.
    The sender has unmapped the blocks before it sends this.
    """

    cache: int
    blocks: bytes = b""
    reserved: bytes = b""
    hashes: bytes = b""
    ack: bool = False


class Match(_Request, frozen=True, tag="match"):
    """How far a prefix is resident, and reaches in the tiers below, pinning nothing; answered by `Matched`.

    With `namespace`, a digest as status names it, `cache` is ignored and that namespace is asked about, which must be
    one of the asker's tenant that somebody opened since the daemon's start.
    """

    cache: int
    hashes: bytes
    namespace: bytes = b""


class Prefetch(_Request, frozen=True, tag="prefetch"):
    """Brings up what the tiers below have of a prefix; answered by `Done` at once, whatever comes of it."""

    cache: int
    hashes: bytes


class FindLast(_Request, frozen=True, tag="find_last"):
    """Which is the last of these hashes that memory or a tier below has, pinning nothing; answered by `FoundLast`.

    Unlike `Match` it asks about each hash by itself: one that is missing says nothing about those behind it.
    """

    cache: int
    hashes: bytes


class Forget(_Request, frozen=True, tag="forget"):
    """Makes single blocks of a blob namespace unfindable, in the pool and every tier; answered by `Forgotten`.

    What is being copied down is forgotten there when the copy ends. A tier that is down keeps its copy, and another
    daemon its own: only a flush is final. Without `below` the tiers keep what they have. Refused with `invalid-request`
    for a namespace that is none of blobs.
    """

    cache: int
    hashes: bytes
    below: bool = True


class Pin(_Request, frozen=True, tag="pin"):
    """Keeps the blocks of a prompt resident from now on, whenever somebody computes them; answered by `Pinned`.

    `hashes` are those of all its full blocks. Pinning it again gives the same pin. `label` is shown, nothing more.
    """

    cache: int
    hashes: bytes
    label: str = ""


class Unpin(_Request, frozen=True, tag="unpin"):
    """Ends a pin, named as `Pinned` did; answered by `Done`. For its user, root and the daemon's user."""

    pin: str


class Flush(_Request, frozen=True, tag="flush"):
    """Makes namespaces unfindable, in the pools and every tier, for good; answered by `Flushed`.

    `namespace` is one digest; with it empty, every namespace, or every one of `model`: those opened since this daemon's
    start, and those that a tier holds from an earlier run or another daemon. Not both. With `tier`, only the tier of
    that name forgets, or the pools alone for "pool". Refused with `permission-refused` unless the namespace is the
    asker's own (with isolation by uid), or the asker is root or the daemon's user; "every" means the asker's own.
    """

    namespace: bytes = b""
    model: str = ""
    tier: str = ""


class Spill(_Request, frozen=True, tag="spill"):
    """Copies every idle block that has no copy below down; answered by `Spilling` at once.

    Ask again to follow how it goes. For root and the daemon's user; with isolation by uid for everybody, who then means
    his own blocks. Others get `permission-refused`.
    """


class Resize(_Request, frozen=True, tag="resize"):
    """Gives the pools of a device another budget, until the daemon stops; answered by `Resized` at once.

    A smaller one first has idle blocks copied down that it would lose; ask again with the same figures to follow that.
    `device` is "" for the main one, "host", a card's number as cuda:0, or the beginning of its UUID. For root and the
    daemon's user; others get `permission-refused`.
    """

    nbytes: int
    device: str = ""


class Status(_Request, frozen=True, tag="status"):
    """A snapshot of everything; answered by `StatusReply`. `with_map` adds a picture of each pool's blocks to it."""

    with_map: bool = False


class Verify(_Request, frozen=True, tag="verify"):
    """Compares some sealed blocks with the checksums their writers gave; answered by `Verified`.

    `cursor` is 0, then what the last reply said, until that says 0. A block that differs is found by nobody from then
    on. For root and the daemon's user; others get `permission-refused`.
    """

    cursor: int = 0


class Check(_Request, frozen=True, tag="check"):
    """Verifies every invariant of the pools; answered by `Done`, or by `Failed` with `state-error` naming the fault.

    For root and the daemon's user; others get `permission-refused`.
    """


Request = (
    OpenCache
    | Begin
    | Reserve
    | Seal
    | Retain
    | Release
    | Match
    | Prefetch
    | FindLast
    | Forget
    | Pin
    | Unpin
    | Flush
    | Spill
    | Resize
    | Status
    | Verify
    | Check
)
