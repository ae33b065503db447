"""What the daemon answers, one class per reply.

Each is a msgpack array: tag, request_id, epoch, then the fields in order.
"""

from __future__ import annotations

import msgspec

from kvd.status import Snapshot


class _Reply(msgspec.Struct, array_like=True, frozen=True, gc=False):
    request_id: int
    epoch: int


class Done(_Reply, frozen=True, tag="done"):
    """It happened."""


class Failed(_Reply, frozen=True, tag="failed"):
    """It did not happen and nothing was changed; `code` is one of `kvd.errors`."""

    code: str
    message: str


class CacheOpened(_Reply, frozen=True, tag="cache_opened"):
    """`digest` is the parent of every first block's hash; a block lies at `index * block_nbytes` of its segment.

    `segment = block_id // blocks_per_segment`, `index = block_id % blocks_per_segment`.

    `device` is where the pool's memory is: "host", or the UUID of a card. For a card `pid_namespace` is the daemon's:
    only processes in it can open the segments. `staged_from` is the card's UUID when this is the host pool beside one.
    """

    cache: int
    pool: int
    digest: bytes
    blocks_per_segment: int
    segment_nbytes: int
    device: str = "host"
    pid_namespace: str = ""
    staged_from: str = ""


class Begun(_Reply, frozen=True, tag="begun"):
    """`blocks` names the cached blocks (the first `num_cached`), then the reserved ones.

    `num_announced` hashes are now announced by this session (a suffix of what it sent). `checksums` is empty or one u64
    a cached block (0 where none was given at the seal).
    """

    num_cached: int
    blocks: bytes
    num_announced: int
    waited: bool = False
    checksums: bytes = b""


class Reserved(_Reply, frozen=True, tag="reserved"):
    """The new reservations, packed."""

    blocks: bytes


class Sealed(_Reply, frozen=True, tag="sealed"):
    """Per block of the request, the block that now stands for its hash: itself, or the one that was there first."""

    blocks: bytes


class Matched(_Reply, frozen=True, tag="matched"):
    """Length of the resident prefix, in blocks, and how far it reaches with the tiers below.

    `reach[i]` is the length of the prefix that the pool and the tiers up to `tiers[i]` have together. Both are empty
    when there is no tier, or none answered in time.
    """

    num_resident: int
    tiers: list[str] = []
    reach: list[int] = []


class FoundLast(_Reply, frozen=True, tag="found_last"):
    """Place of the hash in the request; -1 where none of them is known."""

    place: int


class Forgotten(_Reply, frozen=True, tag="forgotten"):
    """`num_blocks` left the pool."""

    num_blocks: int


class Pinned(_Reply, frozen=True, tag="pinned"):
    """`pin` names it from now on; `num_resident` of its blocks are held now."""

    pin: str
    num_blocks: int
    num_resident: int
    is_lasting: bool = False


class Verified(_Reply, frozen=True, tag="verified"):
    """Of one step: where to go on (0 is the end), blocks compared, blocks without a checksum, hashes that differed."""

    cursor: int
    num_verified: int
    num_unchecked: int
    corrupt: list[str] = []


class Flushed(_Reply, frozen=True, tag="flushed"):
    """`num_blocks` left the pools; `untold` tiers are down, and are told before anything else is asked of them.

    `unlisted` tiers could not say what they hold: namespaces that nobody opened here since the daemon's start may be
    left there, and the request is to be repeated.
    """

    num_namespaces: int
    num_blocks: int
    untold: list[str] = []
    unlisted: list[str] = []


class Spilling(_Reply, frozen=True, tag="spilling"):
    """Idle blocks that have no copy below yet."""

    num_left: int


class Resized(_Reply, frozen=True, tag="resized"):
    """The budget that holds now. It is the one asked for once `num_left` is 0: blocks being copied down before that.

    `used_nbytes` are the pools'; what is above the budget clients still hold. `draining_nbytes` of a card have left the
    pools, and go back when clients have closed them.
    """

    device: str
    budget_nbytes: int
    used_nbytes: int
    draining_nbytes: int
    num_left: int


class StatusReply(_Reply, frozen=True, tag="status_reply"):
    """See `kvd.status`."""

    snapshot: Snapshot


Reply = (
    Done
    | Failed
    | CacheOpened
    | Begun
    | Reserved
    | Sealed
    | Matched
    | FoundLast
    | Forgotten
    | Pinned
    | Flushed
    | Spilling
    | Resized
    | StatusReply
    | Verified
)
