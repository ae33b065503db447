"""The picture of a pool: a letter a block, and a sample of them where there are many."""

from __future__ import annotations

import pytest

from kvd.pool.block_map import block_map
from tests.pool.tiny import ALICE, Tiny


def test_small_pools_are_shown_block_by_block():
    tiny = Tiny(6, per_segment=3)
    tiny.begin(ALICE, "", num_blocks=2)
    assert block_map(tiny.pool.store) == ("ww....", 1)


@pytest.mark.parametrize(
    ("max_letters", "picture", "step"), [(6, "w.w.w.", 2), (4, "wwww", 3), (3, "www", 4), (1, "w", 12)]
)
def test_large_ones_are_sampled_at_even_steps_across_segments(max_letters, picture, step):
    tiny = Tiny(12, per_segment=4)
    reserved = tiny.begin(ALICE, "", num_blocks=12).blocks
    odd = [block for block in reserved if block % step]
    kept_even = odd[::1] if step > 1 else []
    if picture == "w.w.w.":
        # Only what a letter stands for counts: give the blocks 2, 6 and 10 back, which are the second of each pair.
        tiny.pool.release(ALICE, reserved=[reserved[2], reserved[6], reserved[10]])
    else:
        tiny.pool.release(ALICE, reserved=kept_even)
    assert block_map(tiny.pool.store, max_letters) == (picture, step)


def test_a_pool_without_memory_has_no_picture():
    assert block_map(Tiny(0, per_segment=4, spare_segments=1).pool.store) == ("", 1)
