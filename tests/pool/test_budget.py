"""Several pools under one budget: growing, giving segments to each other, shrinking, and memory that cannot be had."""

from __future__ import annotations

import pytest

from kvd.block import NUM_BLOCK_IDS, BlockId, NamespaceDigest, SegmentId, SessionId
from kvd.errors import InvalidLayout, InvalidRequest, OutOfBlocks, OutOfMemory, QuotaExceeded
from kvd.pool import Begun, BudgetUsage, DroppedSegment, Grow, Pool, Pools
from tests.pool.tiny import ALICE, BLOCK, BOB, h, hashes, ids

SEGMENT = 2 * BLOCK


def two_pools(num_segments: int, *, floor: int = 1) -> tuple[Pools, Pool, Pool]:
    """Segments of two blocks."""
    pools = Pools(budget_nbytes=num_segments * SEGMENT, segment_nbytes=SEGMENT, floor_segments=floor)
    pools.open_session(ALICE, 1000)
    pools.open_session(BOB, 1001)
    return pools, pools.pool("one", BLOCK), pools.pool("two", BLOCK)


def reserve(pools: Pools, pool: Pool, num_blocks: int, session: SessionId = ALICE) -> list[int]:
    """Reserves, giving whatever segments the pool asks for."""
    while isinstance(outcome := pool.reserve(session, num_blocks), Grow):
        for _ in range(outcome.num_segments):
            pool.add_segment()
        pools.check_integrity()
    pools.check_integrity()
    return list(outcome)


def keep(pools: Pools, pool: Pool, names: str) -> None:
    """Leaves a sequence behind, idle."""
    blocks = reserve(pools, pool, len(names.split()))
    pool.seal(ALICE, pool.namespace(NamespaceDigest(h("n"))), ids(*blocks), hashes(names))
    pool.release(ALICE, blocks=ids(*blocks))
    pools.check_integrity()


def test_a_pool_grows_before_it_evicts() -> None:
    pools, one, _ = two_pools(2)
    assert one.reserve(ALICE, 1) == Grow(1)
    keep(pools, one, "a b")
    assert one.reserve(ALICE, 1) == Grow(1)
    assert reserve(pools, one, 2) == ids(2, 3)
    assert one.match(hashes("a b")) == 2
    assert reserve(pools, one, 1) == ids(1)  # the budget is used up: evicts b


def test_a_grow_names_what_is_missing_and_no_more_than_the_budget_has() -> None:
    pools, one, _ = two_pools(3)
    assert one.reserve(ALICE, 5) == Grow(3)
    one.add_segment()
    assert one.reserve(ALICE, 5) == Grow(2)
    with pytest.raises(OutOfBlocks):
        one.reserve(ALICE, 7)
    assert pools.num_segments_room() == 2


def test_a_request_no_budget_could_serve_fails_before_anything_grows_or_goes() -> None:
    pools, one, two = two_pools(2)
    keep(pools, two, "a b")
    keep(pools, two, "c d")
    with pytest.raises(OutOfBlocks):
        one.reserve(ALICE, 3)  # two keeps its floor of one segment
    assert two.match(hashes("a b")) == two.match(hashes("c d")) == 2
    assert pools.take_dropped() == []


# case D5
def test_the_coldest_unpinned_segment_of_another_pool_goes_before_our_own_younger_blocks() -> None:
    pools, one, two = two_pools(3)
    keep(pools, two, "a b")  # segment 0 of two: the coldest
    keep(pools, two, "c d")  # segment 1 of two
    keep(pools, one, "x y")
    assert one.reserve(ALICE, 2) == Grow(1)
    assert pools.take_dropped() == [DroppedSegment(two.pool_id, SegmentId(0))]
    assert (two.match(hashes("a b")), two.match(hashes("c d"))) == (0, 2)
    assert reserve(pools, one, 2) == ids(2, 3)
    assert one.match(hashes("x y")) == 2
    assert two.namespaces[NamespaceDigest(h("n"))].evictions == 2


# case D5
def test_our_own_blocks_go_when_they_are_the_colder_ones() -> None:
    pools, one, two = two_pools(3)
    keep(pools, one, "x y")
    keep(pools, two, "a b")
    keep(pools, two, "c d")
    assert reserve(pools, one, 2) == ids(0, 1)  # evicts y and x
    assert pools.take_dropped() == []


# case D5
def test_a_pool_at_its_floor_keeps_its_memory() -> None:
    pools, one, two = two_pools(2)
    keep(pools, two, "a b")
    keep(pools, one, "x y")
    assert reserve(pools, one, 2) == ids(0, 1)  # evicts y and x, though a and b are colder
    assert two.match(hashes("a b")) == 2


# case D5
def test_pinned_segments_stay_and_partly_free_ones_count_by_their_youngest_block() -> None:
    pools, one, two = two_pools(4)
    keep(pools, two, "a b")
    held = reserve(pools, two, 1, BOB)  # segment 1 of two is pinned
    keep(pools, one, "x y")
    keep(pools, two, "c")  # the other half of segment 1
    keep(pools, one, "z w")
    assert one.reserve(ALICE, 1) == Grow(1)
    assert pools.take_dropped() == [DroppedSegment(two.pool_id, SegmentId(0))]
    reserve(pools, one, 1)
    with pytest.raises(OutOfBlocks):
        one.reserve(ALICE, 6)
    two.release(BOB, reserved=ids(*held))
    pools.check_integrity()


def test_what_another_pool_can_spare_is_taken_when_our_own_would_not_do() -> None:
    pools, one, two = two_pools(3)
    keep(pools, one, "x y")
    keep(pools, two, "a b")
    keep(pools, two, "c d")  # younger than all of ours
    assert sorted(reserve(pools, one, 4)) == ids(0, 1, 2, 3)
    assert pools.take_dropped() == [DroppedSegment(two.pool_id, SegmentId(0))]


def test_a_budget_too_small_for_every_floor_still_serves_whoever_asks() -> None:
    pools, one, two = two_pools(1)
    keep(pools, two, "a b")
    keep(pools, one, "x y")
    assert pools.take_dropped() == [DroppedSegment(two.pool_id, SegmentId(0))]
    keep(pools, two, "a b")
    assert pools.take_dropped() == [DroppedSegment(one.pool_id, SegmentId(0))]


def test_shrinking_takes_the_coldest_unpinned_segments_at_once() -> None:
    pools, one, two = two_pools(4)
    keep(pools, one, "a b")
    keep(pools, one, "c d")
    keep(pools, two, "x y")
    keep(pools, two, "z w")
    pools.set_budget(2 * SEGMENT)
    pools.check_integrity()
    assert pools.take_dropped() == [DroppedSegment(0, SegmentId(0)), DroppedSegment(1, SegmentId(0))]
    assert pools.usage() == BudgetUsage(2 * SEGMENT, 2 * SEGMENT, 2, 0)
    assert (one.match(hashes("c d")), two.match(hashes("z w"))) == (2, 2)
    pools.set_budget(3 * SEGMENT)
    assert one.reserve(ALICE, 1) == Grow(1)


def test_shrinking_compares_ages_over_all_pools_and_spares_the_pinned() -> None:
    pools, one, two = two_pools(4, floor=0)
    reserve(pools, one, 1, BOB)  # pins segment 0 of one, the oldest
    keep(pools, one, "x y")  # segment 1 of one
    keep(pools, two, "a b")
    keep(pools, two, "c d")
    begun = one.begin(
        ALICE,
        one.namespace(NamespaceDigest(h("n"))),
        hashes("x"),
        max_cached=1,
        num_blocks=1,
        announce=False,
        may_wait=False,
    )
    one.release(ALICE, blocks=begun.blocks)  # type: ignore[union-attr]  # now the youngest
    for num_segments, (pool, segment) in ((3, (two, 0)), (2, (two, 1)), (1, (one, 1))):
        pools.set_budget(num_segments * SEGMENT)
        pools.check_integrity()
        assert pools.take_dropped() == [DroppedSegment(pool.pool_id, SegmentId(segment))]
    pools.set_budget(0)
    assert pools.take_dropped() == []
    assert pools.usage().num_segments_retiring == 1


# case B6
def test_a_held_block_outlives_the_shrinking_until_its_last_release() -> None:
    pools, one, _ = two_pools(2)
    keep(pools, one, "a b")
    begun = one.begin(
        BOB,
        one.namespace(NamespaceDigest(h("n"))),
        hashes("a"),
        max_cached=1,
        num_blocks=1,
        announce=False,
        may_wait=False,
    )
    writing = reserve(pools, one, 1)  # block 2, in segment 1
    pools.set_budget(0)
    pools.check_integrity()
    assert pools.take_dropped() == []
    assert pools.usage() == BudgetUsage(0, 2 * SEGMENT, 2, 2)
    assert (one.match(hashes("a")), one.match(hashes("b"))) == (1, 0)  # b went, a is held and found
    with pytest.raises(OutOfBlocks):
        one.reserve(ALICE, 1)
    one.release(BOB, blocks=begun.blocks)  # type: ignore[union-attr]
    pools.check_integrity()
    assert pools.take_dropped() == [DroppedSegment(0, SegmentId(0))]
    assert one.match(hashes("a")) == 0
    sealed = one.seal(ALICE, one.namespace(NamespaceDigest(h("n"))), ids(*writing), hashes("c"))
    pools.check_integrity()
    one.release(ALICE, blocks=sealed)
    pools.check_integrity()
    assert pools.take_dropped() == [DroppedSegment(0, SegmentId(1))]
    assert pools.usage() == BudgetUsage(0, 0, 0, 0)


def test_a_copy_that_runs_keeps_its_segment() -> None:
    pools, one, _ = two_pools(1)
    keep(pools, one, "a")
    spill = one.begin_spill(ids(0)[0])
    fill = one.begin_fill(one.namespace(NamespaceDigest(h("n"))), h("f"))
    pools.set_budget(0)
    pools.check_integrity()
    one.complete_spill(spill, True)
    pools.check_integrity()
    assert pools.take_dropped() == []
    one.complete_fill(fill, True)  # type: ignore[arg-type]
    pools.check_integrity()
    assert pools.take_dropped() == [DroppedSegment(0, SegmentId(0))]


def test_segment_numbers_are_never_used_again() -> None:
    pools, one, two = two_pools(1)
    keep(pools, one, "a b")
    keep(pools, two, "x y")
    keep(pools, one, "a b")
    assert one.match(hashes("a b")) == 2
    assert reserve(pools, one, 2) == ids(2, 3)


def with_ids_left(pool: Pool, num_segments: int) -> None:
    """As if all other ids had been given to segments that went again."""
    pool.store._next_segment = NUM_BLOCK_IDS // pool.blocks_per_segment - num_segments


def test_a_pool_grows_until_its_block_ids_are_used_up_and_then_evicts() -> None:
    pools, one, two = two_pools(8)
    with_ids_left(one, 1)
    assert one.num_attainable == 2
    assert reserve(pools, one, 2) == ids(NUM_BLOCK_IDS - 2, NUM_BLOCK_IDS - 1)
    with pytest.raises(OutOfBlocks, match="restart the daemon"):
        one.reserve(ALICE, 1)
    blocks = ids(NUM_BLOCK_IDS - 2, NUM_BLOCK_IDS - 1)
    one.seal(ALICE, one.namespace(NamespaceDigest(h("n"))), blocks, hashes("a b"))
    one.release(ALICE, blocks=blocks)
    assert (one.num_attainable, one.num_expendable, two.num_expendable) == (2, 0, 14)
    assert reserve(pools, one, 1) == ids(NUM_BLOCK_IDS - 1)  # evicts b, though the budget has room
    with pytest.raises(OutOfBlocks, match="restart the daemon"):
        one.add_segment()
    pools.check_integrity()
    assert len(one.store.segments) == 1
    assert pools.num_segments_room() == 0  # for whichever pool asks
    assert len(reserve(pools, two, 4)) == 4


def test_a_grow_is_for_no_more_segments_than_there_are_block_ids_for() -> None:
    pools, one, _ = two_pools(8)
    with_ids_left(one, 2)
    assert one.reserve(ALICE, 4) == Grow(2)
    with pytest.raises(OutOfBlocks, match="2 segments of 2 may be added"):
        one.reserve(ALICE, 5)
    assert pools.num_segments_room() == 2


def test_no_pool_gives_up_a_segment_to_one_without_block_ids() -> None:
    pools, one, two = two_pools(3)
    keep(pools, two, "a b")
    keep(pools, two, "c d")
    keep(pools, one, "x y")
    with_ids_left(one, 0)
    assert reserve(pools, one, 1) == ids(1)  # evicts y, though a b are colder
    assert pools.take_dropped() == []


def test_a_segment_without_room_is_refused() -> None:
    pools, one, two = two_pools(1)
    assert one.reserve(ALICE, 1) == Grow(1) == two.reserve(ALICE, 1)
    one.add_segment()
    with pytest.raises(OutOfBlocks):
        two.add_segment()
    pools.check_integrity()
    assert two.reserve(ALICE, 1) == Grow(1)  # one's empty segment went
    two.add_segment()


# case D1
def test_memory_that_cannot_be_had_means_evicting_until_it_may_be_tried_again() -> None:
    pools, one, two = two_pools(4)
    keep(pools, one, "a b")
    assert one.reserve(ALICE, 1) == Grow(1)
    pools.growth_failed(one.pool_id, "the cgroup allows 8192 bytes")
    assert reserve(pools, one, 1) == ids(1)  # evicts b
    with pytest.raises(OutOfBlocks, match="the machine gave no more memory: the cgroup allows 8192 bytes"):
        one.reserve(ALICE, 2)
    with pytest.raises(OutOfMemory, match="the cgroup allows"):
        two.reserve(ALICE, 1)
    pools.memory_retry()
    assert two.reserve(ALICE, 1) == Grow(1)


# case D1
def test_without_more_memory_a_segment_can_still_change_its_pool() -> None:
    pools, one, two = two_pools(8)
    for names in ("a b", "c d", "e f"):
        keep(pools, one, names)
    pools.growth_failed(two.pool_id, "no memory")
    assert two.reserve(ALICE, 1) == Grow(1)
    assert pools.take_dropped() == [DroppedSegment(0, SegmentId(0))]
    two.add_segment()
    assert pools.num_segments_room() == 0


def test_pools_are_apart_by_tenant_and_block_size() -> None:
    pools, one, two = two_pools(2)
    assert pools.pool("one", BLOCK) is one is pools.all[0]
    assert len({one.pool_id, two.pool_id, pools.pool("one", 2 * BLOCK).pool_id}) == 3
    keep(pools, one, "a b")
    assert two.match(hashes("a")) == 0


@pytest.mark.parametrize("block_nbytes", [0, -BLOCK, 100, BLOCK + 1, SEGMENT + BLOCK])
def test_a_block_that_is_not_pages_or_not_in_a_segment_is_refused(block_nbytes: int) -> None:
    pools, _, _ = two_pools(2)
    with pytest.raises(InvalidLayout):
        pools.pool("three", block_nbytes)


def test_absurd_sizes_are_refused() -> None:
    for segment_nbytes, budget_nbytes in ((0, 0), (5, 10), (BLOCK, -1)):
        with pytest.raises(InvalidRequest):
            Pools(budget_nbytes=budget_nbytes, segment_nbytes=segment_nbytes)
    pools, _, _ = two_pools(1)
    with pytest.raises(InvalidRequest):
        pools.set_budget(-1)


def test_quotas_count_over_all_pools() -> None:
    pools = Pools(budget_nbytes=4 * SEGMENT, segment_nbytes=SEGMENT, session_quota_nbytes=2 * BLOCK)
    pools.open_session(ALICE, 0)
    reserve(pools, pools.pool("one", BLOCK), 1)
    reserve(pools, pools.pool("two", BLOCK), 1)
    with pytest.raises(QuotaExceeded):
        pools.pool("three", BLOCK).reserve(ALICE, 1)


def test_a_segment_that_only_pays_for_a_retiring_one_is_no_room_to_grow() -> None:
    pools, one, two = two_pools(2, floor=0)
    held = reserve(pools, one, 3)  # both segments
    pools.set_budget(SEGMENT)  # segment 1 retires, block 2 in it is held
    one.release(ALICE, reserved=ids(*held[:2]))  # segment 0 is free
    with pytest.raises(OutOfBlocks):
        two.reserve(ALICE, 1)
    pools.check_integrity()
    assert pools.take_dropped() == []
    one.release(ALICE, reserved=ids(held[2]))
    assert two.reserve(ALICE, 1) == Grow(1)


def test_no_segment_of_another_pool_goes_where_that_would_give_no_room() -> None:
    pools, one, two = two_pools(4)

    def hold(pool: Pool, names: str) -> list[BlockId]:
        keep(pools, pool, names)
        namespace = pool.namespace(NamespaceDigest(h("n")))
        begun = pool.begin(BOB, namespace, hashes(names), max_cached=2, num_blocks=2, announce=False, may_wait=False)
        assert isinstance(begun, Begun)
        return begun.blocks

    hold(two, "a b")
    cd, ef, xy = hold(two, "c d"), hold(two, "e f"), hold(one, "x y")
    pools.set_budget(3 * SEGMENT)  # a b retires, and stays above the budget while BOB holds it
    two.release(BOB, blocks=cd)
    two.release(BOB, blocks=ef)
    one.release(BOB, blocks=xy)
    assert len(reserve(pools, one, 1)) == 1  # evicts y, younger than c d: giving up c d would only pay for a b
    assert pools.take_dropped() == []
    assert two.match(hashes("c d")) == 2
