"""Blocks as runs, and where they lie so that the kernel can enter huge pages whole."""

from __future__ import annotations

import itertools
import os

import pytest

from kvd.block import BlockId
from kvd.protocol.session import SegmentGranted
from kvd_client.memory.address_range import HUGE_PAGE_NBYTES, AddressRange
from kvd_client.memory.segments import PoolMemory, SegmentTable

PER_SEGMENT = 8
BLOCK_NBYTES = 360 << 10


def memory() -> PoolMemory:
    return PoolMemory(0, BLOCK_NBYTES, PER_SEGMENT, lambda _pool, segment, _writable: segment)


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([2, 3, 4], [(0, 3)]),
        ([6, 7, 8, 9], [(0, 2), (2, 2)]),  # neighbours, but in two segments
        ([4, 3, 2], [(0, 1), (1, 1), (2, 1)]),
        ([2, 3, 12, 13, 14, 1], [(0, 2), (2, 3), (5, 1)]),
    ],
    ids=str,
)
def test_neighbours_in_one_segment_are_one_run(blocks: list[BlockId], runs: list[tuple[int, int]]) -> None:
    found = list(memory().runs(blocks, writable=False))
    assert [(run.first, run.num_blocks) for run in found] == runs
    assert memory().num_runs(blocks) == len(runs)
    for run in found:
        segment, index = divmod(blocks[run.first], PER_SEGMENT)
        assert (run.fd, run.offset) == (segment, index * BLOCK_NBYTES)


@pytest.mark.parametrize("blocks", [[3], [0, 1, 2], [5, 6, 7], [9, 2, 3, 4], [2, 9, 10, 11]], ids=str)
def test_the_longest_run_lies_at_the_same_place_of_a_huge_page_in_memory_and_in_its_segment(
    blocks: list[BlockId],
) -> None:
    pool = memory()
    longest = max(pool.runs(blocks, writable=False), key=lambda run: run.num_blocks)
    space = AddressRange(16 * BLOCK_NBYTES, pool.phase(blocks) % HUGE_PAGE_NBYTES)
    try:
        place = space.address + longest.first * BLOCK_NBYTES
        assert (place - longest.offset) % HUGE_PAGE_NBYTES == 0
    finally:
        space.close()


# case D3
def test_a_reader_is_given_the_read_only_descriptor_of_two() -> None:
    table = SegmentTable()
    read_only, writable = (os.memfd_create(name) for name in ("read-only", "writable"))
    table.granted(SegmentGranted(0, 5, 4096, writable=True), writable)
    assert table.find(0, 5, writable=False) == writable
    table.granted(SegmentGranted(0, 5, 4096, writable=False), read_only)
    assert (table.find(0, 5, writable=False), table.find(0, 5, writable=True)) == (read_only, writable)
    table.close()
    assert table.find(0, 5, writable=False) is None


def test_no_blocks_want_no_place() -> None:
    assert memory().phase([]) == 0


def test_ranges_come_and_go() -> None:
    for phase in itertools.islice(itertools.count(0, 4096), 50):
        space = AddressRange(3 << 20, phase)
        assert space.address % HUGE_PAGE_NBYTES == phase
        space.close()
        space.close()
