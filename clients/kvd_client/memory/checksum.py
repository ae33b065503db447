"""Seal-time checksums: one xxh3-64 of a block's bytes, 0 where its writer gave none."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash


def pack_checksums(blocks: Iterable[memoryview]) -> bytes:
    """One little-endian u64 a block, as they travel."""
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(block)) for block in blocks)


def first_corrupt(packed: bytes, blocks: Iterable[memoryview]) -> int | None:
    """The place of the first block whose bytes differ from its checksum; blocks without one are passed over."""
    for place, ((given,), block) in enumerate(zip(struct.iter_unpack("<Q", packed), blocks, strict=False)):
        if given and given != xxhash.xxh3_64_intdigest(block):
            return place
    return None
