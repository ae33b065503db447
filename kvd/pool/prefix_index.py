"""Which block stands for which chain hash: at most one sealed block, and at most one being filled, per hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvd.block import ChainHash
from kvd.pool.blocks import Block


class PrefixIndex:
    """Invariant: `sealed[h].hash == h` for every entry, and a sealed block with a hash is always an entry."""

    __slots__ = ("filling", "sealed")

    def __init__(self) -> None:
        self.sealed: dict[ChainHash, Block] = {}
        self.filling: dict[ChainHash, Block] = {}
        """Blocks a promotion is writing, as long as its outcome is wanted."""

    def prefix(self, hashes: Sequence[ChainHash], limit: int) -> list[Block]:
        """The sealed blocks of the longest resident prefix, `limit` at most."""
        wanted = hashes if limit >= len(hashes) else hashes[:limit]
        found = list(map(self.sealed.get, wanted))
        if None in found:
            del found[found.index(None) :]
        return cast("list[Block]", found)

    def forget(self, block: Block) -> None:
        """Removes every trace of the hash of a sealed or filling block, so that it never answers to it again."""
        if block.hash is None:
            return
        for by_hash in (self.sealed, self.filling):
            if by_hash.get(block.hash) is block:
                del by_hash[block.hash]
                if by_hash is self.sealed and block.namespace is not None:
                    block.namespace.num_sealed -= 1
        block.hash = None
        block.namespace = None
        block.checksum = 0
