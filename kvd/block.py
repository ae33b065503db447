"""What names a block, and the states it can be in. Shared by the daemon and the client library."""

from __future__ import annotations

import enum
from typing import NewType

BlockId = NewType("BlockId", int)
"""A block within one pool: segment number * blocks per segment + index. Segment numbers are never used again."""

SegmentId = NewType("SegmentId", int)
"""A segment within one pool, counted up from 0 and never used again while the daemon lives."""

ChainHash = NewType("ChainHash", bytes)
"""32 bytes: SHA-256 over (parent hash, token ids of one block); see `kvd.hashing`."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes: SHA-256 over everything that must be equal for KV to be exchangeable; the parent of a first block."""

SessionId = NewType("SessionId", int)
"""One connected client process; counted up from 1 and never used again while the daemon lives."""

HOST = "host"
"""What a device is called that is the machine's own memory; every other one is a card, called by its UUID."""
NUM_BLOCK_IDS = 1 << 32
"""How many ids a pool has for all blocks it ever had: they travel as u32."""
HASH_NBYTES = 32
PAGE_NBYTES = 4096


class BlockState(enum.Enum):
    """The life of a block; `kvd.pool` makes every move."""

    FREE = "free"  # belongs to nobody; its bytes mean nothing
    RESERVED = "reserved"  # belongs to one writer; nobody else can see it
    FILLING = "filling"  # a promotion writes it; those who want its hash wait for that one promotion
    SEALED = "sealed"  # immutable and found by hash; evictable while nobody references it
