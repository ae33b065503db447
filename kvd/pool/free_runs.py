"""Which blocks are free, kept as runs of adjacent ones: a two-level fit with boundary tags.

Every run is in two dictionaries (by its first block and by the block after its last: the boundary tags that make
joining O(1)) and in the bin of its size class, a power of two. Taking and giving back cost O(1) a run.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_LOOKS = 8
"""Runs looked at in a bin whose runs may be too short, so that a take stays O(1)."""


class FreeRuns:
    """Runs never cross a multiple of `run_limit`, the size of a segment: there the memory is not adjacent."""

    __slots__ = ("_bins", "_ends", "_lengths", "_occupied", "_run_limit", "num_free")

    def __init__(self, run_limit: int) -> None:
        self._run_limit = run_limit
        self._lengths: dict[int, int] = {}
        """First block -> length. Two runs of one segment never touch: they would have been joined."""
        self._ends: dict[int, int] = {}
        """Block after the last -> first block."""
        self._bins: list[dict[int, None]] = [{} for _ in range(run_limit.bit_length())]
        """Bin k holds the runs of 2**k to 2**(k+1) - 1 blocks."""
        self._occupied = 0
        """Bit k is set exactly when bin k is not empty."""
        self.num_free = 0

    def put(self, start: int, length: int) -> None:
        """The blocks `start .. start + length - 1`, all of one segment and none of them free, become free."""
        self.num_free += length
        end = start + length
        if end % self._run_limit and (after := self._lengths.get(end)):
            self._remove(end, after)
            length += after
        if start % self._run_limit and (before := self._ends.get(start)) is not None:
            length += start - before
            self._remove(before, start - before)
            start = before
        self._insert(start, length)

    def put_all(self, block_ids: Iterable[int]) -> None:
        """Frees blocks in any order, adjacent ones as one run."""
        start = end = -1
        for block_id in sorted(block_ids):
            if block_id == end and end % self._run_limit:
                end += 1
                continue
            if start >= 0:
                self.put(start, end - start)
            start, end = block_id, block_id + 1
        if start >= 0:
            self.put(start, end - start)

    def take(self, num_blocks: int) -> list[tuple[int, int]]:
        """`num_blocks` (at most `num_free`) as (start, length): one run that fits well, else the largest first."""
        taken: list[tuple[int, int]] = []
        self.num_free -= num_blocks
        while num_blocks:
            start = self._fitting(num_blocks)
            if start is None:
                (start,) = self._some(self._occupied.bit_length() - 1, 1)
            length = self._lengths[start]
            self._remove(start, length)
            used = min(length, num_blocks)
            if used < length:
                self._insert(start + used, length - used)
            taken.append((start, used))
            num_blocks -= used
        return taken

    def remove_segment(self, first: int) -> None:
        """Forgets every free run of the segment that begins at `first`; O(blocks of a segment)."""
        position = first
        while position < first + self._run_limit:
            length = self._lengths.get(position, 0)
            if length:
                self._remove(position, length)
                self.num_free -= length
            position += length or 1

    def runs(self) -> list[tuple[int, int]]:
        """Every free run as (start, length), by start."""
        return sorted(self._lengths.items())

    def fault(self) -> str | None:
        """What is wrong with the bookkeeping, or None."""
        if self._ends != {start + length: start for start, length in self._lengths.items()}:
            return "the boundary tags of the free runs disagree"
        if self.num_free != sum(self._lengths.values()):
            return f"num_free is {self.num_free}, the free runs hold {sum(self._lengths.values())}"
        for start, length in self._lengths.items():
            if start // self._run_limit != (start + length - 1) // self._run_limit:
                return f"the free run at {start} crosses segments"
            if (start + length) % self._run_limit and start + length in self._lengths:
                return f"the free run at {start} was not joined with the next"
        binned = {start: k for k, content in enumerate(self._bins) for start in content}
        if binned != {start: length.bit_length() - 1 for start, length in self._lengths.items()}:
            return "a free run is in the wrong bin"
        if self._occupied != sum(1 << k for k, content in enumerate(self._bins) if content):
            return "the map of occupied bins is wrong"
        return None

    def _fitting(self, num_blocks: int) -> int | None:
        """A run of at least `num_blocks`: the closest among a few of its own size class, else any of the next class."""
        own = num_blocks.bit_length() - 1
        if own >= len(self._bins):
            return None
        lengths = self._lengths
        fitting = [start for start in self._some(own, _MAX_LOOKS) if lengths[start] >= num_blocks]
        if fitting:
            return min(fitting, key=lengths.__getitem__)
        larger = self._occupied >> (own + 1)
        if not larger:
            return None
        (start,) = self._some(own + 1 + (larger & -larger).bit_length() - 1, 1)
        return start

    def _some(self, size_class: int, at_most: int) -> list[int]:
        """The runs put last into a bin. Popped and put back, since iterating a dict that shrank walks all its holes."""
        content = self._bins[size_class]
        starts = [content.popitem()[0] for _ in range(min(at_most, len(content)))]
        for start in reversed(starts):
            content[start] = None
        return starts

    def _insert(self, start: int, length: int) -> None:
        self._lengths[start] = length
        self._ends[start + length] = start
        size_class = length.bit_length() - 1
        self._bins[size_class][start] = None
        self._occupied |= 1 << size_class

    def _remove(self, start: int, length: int) -> None:
        del self._lengths[start]
        del self._ends[start + length]
        size_class = length.bit_length() - 1
        content = self._bins[size_class]
        del content[start]
        if not content:
            self._occupied &= ~(1 << size_class)
