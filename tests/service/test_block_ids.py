"""A pool whose block ids are used up goes on with what it has, and nobody's request stops the daemon."""

from __future__ import annotations

from kvd.block import NUM_BLOCK_IDS
from tests.service.harness import House, error_code, reserved_blocks


def test_the_last_segment_there_are_ids_for_goes_to_the_first_who_waits_and_the_next_is_refused(house: House) -> None:
    house.stock.gives = False
    one, two = house.client(), house.client()
    one.open(), two.open()
    pool = house.pools.all[0]
    pool.store._next_segment = NUM_BLOCK_IDS // pool.blocks_per_segment - 1
    assert one.reserve(pool.blocks_per_segment) is None
    assert two.reserve(pool.blocks_per_segment) is None
    house.stock.make(2)
    house.memory_ready()
    blocks = reserved_blocks(one, one.answer())
    assert max(blocks) == NUM_BLOCK_IDS - 1
    assert error_code(two.answer()) == "out-of-blocks"
    one.release(reserved=blocks)
    assert len(reserved_blocks(two, two.reserve(pool.blocks_per_segment))) == len(blocks)
