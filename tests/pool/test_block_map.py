"""The picture of a pool: a letter a block, and a sample of them where there are many."""

from __future__ import annotations

import pytest

from kvd.pool.block_map import block_map
from tests.pool.tiny import ALICE, Tiny


@pytest.fixture
def full() -> Tiny:
    """Twelve blocks in three segments, all reserved by one writer."""
    tiny = Tiny(12, per_segment=4)
    assert sorted(tiny.begin(ALICE, "", num_blocks=12).blocks) == list(range(12))
    return tiny


def test_small_pools_are_shown_block_by_block(full):
    full.pool.release(ALICE, reserved=[1, 4, 11])
    assert block_map(full.pool.store) == ("w.ww.wwwwww.", 1)


@pytest.mark.parametrize(
    ("max_letters", "picture", "step"), [(6, ".ww.ww", 2), (5, ".w.w", 3), (4, ".w.w", 3), (3, ".ww", 4), (1, ".", 12)]
)
def test_large_ones_are_sampled_at_even_steps_across_segments(full, max_letters, picture, step):
    full.pool.release(ALICE, reserved=[0, 6])
    assert block_map(full.pool.store, max_letters) == (picture, step)


def test_a_pool_without_memory_has_no_picture():
    assert block_map(Tiny(0, per_segment=4, spare_segments=1).pool.store) == ("", 1)
