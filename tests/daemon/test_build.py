"""What the configuration leaves open is decided sensibly."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest

from kvd.build import Sizes, decide_sizes, session_capacity
from kvd.build.sizes import DESCRIPTORS_PER_COPIED_SEGMENT, DESCRIPTORS_PER_SEGMENT
from kvd.config.schema import Memory
from kvd.daemon.process import GrowthFreezer
from kvd.errors import OutOfMemory
from kvd.memory import HostSegment
from tests.support.daemon import running_daemon
from tests.support.raw_client import RawClient

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("budget_nbytes", "segment_nbytes"),
    [(16 * GIB, 256 * MIB), (4 * GIB, 64 * MIB), (100 * MIB, 16 * MIB), (5 * MIB, 5 * MIB), (64 * GIB, 256 * MIB)],
)
def test_auto_segments_follow_the_budget(budget_nbytes, segment_nbytes):
    assert decide_sizes(Memory(budget=budget_nbytes), 100 * GIB) == Sizes(budget_nbytes, segment_nbytes)


@pytest.mark.parametrize("available_nbytes", [64 * MIB, 3 * GIB, 1000 * GIB])
def test_an_auto_budget_is_whole_segments_and_leaves_room(available_nbytes):
    sizes = decide_sizes(Memory(), available_nbytes)
    assert sizes.budget_nbytes % sizes.segment_nbytes == 0
    assert sizes.segment_nbytes <= sizes.budget_nbytes <= available_nbytes // 2


def test_a_budget_larger_than_memory_is_refused():
    with pytest.raises(OutOfMemory, match=r"memory\.budget"):
        decide_sizes(Memory(budget=2 * GIB), GIB)


def test_sessions_are_bounded_by_descriptors():
    assert session_capacity(20_000, Sizes(16 * GIB, 256 * MIB)) > 4000
    assert session_capacity(100, Sizes(16 * GIB, 256 * MIB)) == 1


def test_tiers_take_descriptors_from_sessions():
    sizes = Sizes(16 * GIB, 256 * MIB)
    plain = session_capacity(20_000, sizes)
    assert session_capacity(20_000, sizes, has_tiers=True) == plain - 64 // 4
    assert session_capacity(20_000, sizes, has_tiers=True, host_tier_nbytes=8 * GIB) == plain - (64 + 32 * 2) // 4
    assert session_capacity(1000, Sizes(256 * MIB, 256 * MIB), host_tier_nbytes=16 * MIB) == (1000 - 600 - 4) // 4


def test_a_segment_has_as_many_descriptors_as_are_counted():
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    with HostSegment(MIB) as segment:
        assert num_open() - before == DESCRIPTORS_PER_SEGMENT
        segment.view(0, MIB).release()
        assert num_open() - before == DESCRIPTORS_PER_COPIED_SEGMENT
    assert num_open() == before


def test_pools_that_grew_are_out_of_the_collectors_sight():
    freezer = GrowthFreezer()
    try:
        frozen = []
        grown: list[list[int]] = []
        for used_nbytes in (0, 1, 2, 3, 6, 7):
            grown.append([])
            freezer.look(used_nbytes)
            frozen.append(any(one is grown[-1] for one in gc.get_objects()) is False)
    finally:
        gc.unfreeze()
    assert frozen == [False, True, False, True, False, True]


def test_more_sessions_than_descriptors_are_a_warning(tmp_path):
    with running_daemon(tmp_path, limits={"sessions": 65_536}) as daemon, RawClient(daemon.folder) as raw:
        limit, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        assert bool(raw.status().warnings) == (limit < 4 * 65_536)
