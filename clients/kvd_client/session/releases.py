"""Releases of any size, in messages that the daemon takes: it looks at a bounded number of blocks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvd.block import HASH_NBYTES
from kvd.protocol.requests import Release
from kvd.protocol.wire import BLOCK_ID_NBYTES, MAX_IDS_PER_RELEASE


def releases(
    next_id: Callable[[], int],
    epoch: int,
    cache: int,
    *,
    blocks: bytes = b"",
    reserved: bytes = b"",
    hashes: bytes = b"",
    limit: int = MAX_IDS_PER_RELEASE,
) -> Iterator[Release]:
    """One, or as many as it takes, each with at most `limit` entries a list; arguments as of `Release`, packed.

    The tail of a sequence is in the first one, since what is given back first is evicted first.
    """
    lists = ((blocks, BLOCK_ID_NBYTES), (reserved, BLOCK_ID_NBYTES), (hashes, HASH_NBYTES))
    num_messages = max(1, *(-(-len(packed) // (nbytes * limit)) for packed, nbytes in lists))
    for number in reversed(range(num_messages)):
        parts = (packed[number * limit * nbytes : (number + 1) * limit * nbytes] for packed, nbytes in lists)
        some_blocks, some_reserved, some_hashes = parts
        yield Release(next_id(), epoch, cache, some_blocks, some_reserved, some_hashes)
