"""The descriptors of host segments that the daemon has granted this session, and where in them a block lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from kvd.block import BlockId
from kvd.protocol.session import SegmentGranted, SegmentRevoked
from kvd_client.memory.block_runs import split_runs


class SegmentTable:
    """(pool, segment) -> descriptors; at most one read-only and one writable each. Owns them."""

    def __init__(self) -> None:
        self._read_only: dict[tuple[int, int], int] = {}
        self._writable: dict[tuple[int, int], int] = {}

    def granted(self, message: SegmentGranted, fd: int) -> None:
        """Takes over `fd`; one for the same segment that came before is closed."""
        table = self._writable if message.writable else self._read_only
        previous = table.pop((message.pool, message.segment), None)
        if previous is not None:
            os.close(previous)
        table[message.pool, message.segment] = fd

    def revoked(self, message: SegmentRevoked) -> None:
        """Closes the segment's descriptors. No block of it is mapped any more.

        Only wholly free segments are revoked.
        """
        for table in (self._read_only, self._writable):
            fd = table.pop((message.pool, message.segment), None)
            if fd is not None:
                os.close(fd)

    def find(self, pool: int, segment: int, *, writable: bool) -> int | None:
        """A descriptor good for such a mapping; a reader is never given the writable one while it has another."""
        key = (pool, segment)
        if writable:
            return self._writable.get(key)
        return self._read_only.get(key, self._writable.get(key))

    def close(self) -> None:
        """Closes every descriptor; mappings stay. Idempotent."""
        for table in (self._read_only, self._writable):
            while table:
                os.close(table.popitem()[1])


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that are neighbours in a segment and in a sequence: one mapping, one read, one write."""

    first: int
    """Place of the first block among those asked about."""
    num_blocks: int
    fd: int
    offset: int
    """In the descriptor, in bytes."""


class PoolMemory:
    """Where a host pool's blocks lie. `descriptor(pool, segment, writable)` waits for a grant that is under way."""

    def __init__(
        self,
        pool: int,
        block_nbytes: int,
        blocks_per_segment: int,
        descriptor: Callable[[int, int, bool], int],
    ) -> None:
        self.pool = pool
        self.block_nbytes = block_nbytes
        self._blocks_per_segment = blocks_per_segment
        self._descriptor = descriptor

    def runs(self, blocks: Sequence[BlockId], *, writable: bool) -> Iterator[Run]:
        """The blocks as runs, in their order. Raises `StateError` when the daemon never granted a segment."""
        for first, num_blocks in self._split(blocks):
            segment, index = divmod(blocks[first], self._blocks_per_segment)
            fd = self._descriptor(self.pool, segment, writable)
            yield Run(first, num_blocks, fd, index * self.block_nbytes)

    def await_grants(self, blocks: Sequence[BlockId], *, writable: bool) -> None:
        """Returns when every segment of `blocks` is granted: so that nobody waits for one while holding the guard."""
        for segment in {blocks[first] // self._blocks_per_segment for first, _ in self._split(blocks)}:
            self._descriptor(self.pool, segment, writable)

    def num_runs(self, blocks: Sequence[BlockId]) -> int:
        """How many mappings the blocks need."""
        return len(self._split(blocks))

    def phase(self, blocks: Sequence[BlockId]) -> int:
        """How far the longest run lies in its segment beyond where it lies among `blocks`, in bytes."""
        first, _ = max(self._split(blocks), key=itemgetter(1), default=(0, 0))
        return (blocks[first] % self._blocks_per_segment - first) * self.block_nbytes if blocks else 0

    def _split(self, blocks: Sequence[BlockId]) -> list[tuple[int, int]]:
        return split_runs(blocks, self._blocks_per_segment)
