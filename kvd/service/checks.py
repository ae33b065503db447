"""Figures of a request that can never be right, refused before anything looks at them."""

from __future__ import annotations

import math
import struct

from kvd.block import BlockId
from kvd.errors import InvalidRequest
from kvd.protocol.wire import BLOCK_ID_NBYTES, MAX_IDS_PER_MESSAGE, unpack_block_ids

MAX_BLOCKS_PER_REQUEST = 1 << 20
MAX_WAIT_S = 86_400.0
_CHECKSUM_NBYTES = 8


def check_num_blocks(num_blocks: int, *, at_least: int = 1) -> None:
    """Raises `InvalidRequest` unless it is a number of blocks that one request may ask for."""
    if not at_least <= num_blocks <= MAX_BLOCKS_PER_REQUEST:
        raise InvalidRequest(f"num_blocks must be from {at_least} to {MAX_BLOCKS_PER_REQUEST}, not {num_blocks}")


def check_begin(*, num_hashes: int, max_cached: int, num_blocks: int, whole: bool = False) -> None:
    """Raises `InvalidRequest` unless hashes <= blocks and 0 <= max_cached <= blocks; all are equal with `whole`."""
    check_num_blocks(num_blocks)
    if num_hashes > num_blocks:
        raise InvalidRequest(f"{num_hashes} hashes do not fit a sequence of {num_blocks} blocks")
    if not 0 <= max_cached <= num_blocks:
        raise InvalidRequest(f"max_cached must be from 0 to num_blocks ({num_blocks}), not {max_cached}")
    if whole and not num_hashes == max_cached == num_blocks:
        raise InvalidRequest(
            f"whole means all: {num_hashes} hashes, {max_cached} to attach, {num_blocks} blocks differ"
        )


def check_wait_s(wait_s: float) -> float:
    """The wait, or `InvalidRequest` for one that is negative, not a number, or longer than a day."""
    if not 0 <= wait_s <= MAX_WAIT_S or math.isnan(wait_s):
        raise InvalidRequest(f"wait_s must be from 0 to {MAX_WAIT_S:.0f} seconds, not {wait_s}")
    return wait_s


def unpack_ids(packed: bytes, limit: int = MAX_IDS_PER_MESSAGE) -> tuple[BlockId, ...]:
    """`unpack_block_ids` of no more than one request may name. Raises `InvalidRequest`."""
    if len(packed) > limit * BLOCK_ID_NBYTES:
        raise InvalidRequest(f"such a request names at most {limit} blocks a list; send several")
    return unpack_block_ids(packed)


def unpack_checksums(packed: bytes, num_blocks: int) -> list[int] | None:
    """One u64 a block, None for none at all. Raises `InvalidRequest` for another number of them."""
    if not packed:
        return None
    if len(packed) != num_blocks * _CHECKSUM_NBYTES:
        raise InvalidRequest(f"{len(packed)} bytes of checksums do not fit {num_blocks} blocks of 8 bytes each")
    return list(struct.unpack(f"<{num_blocks}Q", packed))


def pack_checksums(checksums: list[int]) -> bytes:
    """The inverse of `unpack_checksums`."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)
