"""What the configuration leaves open is decided sensibly."""

from __future__ import annotations

import resource

import pytest

from kvd.build import Sizes, decide_sizes, session_capacity
from kvd.config.schema import Memory
from kvd.errors import OutOfMemory
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


def test_more_sessions_than_descriptors_are_a_warning(tmp_path):
    with running_daemon(tmp_path, limits={"sessions": 65_536}) as daemon, RawClient(daemon.folder) as raw:
        limit, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        assert bool(raw.status().warnings) == (limit < 4 * 65_536)
