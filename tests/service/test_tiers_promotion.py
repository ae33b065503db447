"""A begin finds what lies below: asks once, waits for one copy, takes what is there when anything goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.errors import BlockCorrupt, BlockMissing, TierUnavailable
from kvd.hashing import pack_hashes
from kvd.mover import Fill, Lookup
from kvd.mover.jobs import Rank
from kvd.protocol import requests
from kvd.protocol.replies import Begun, Done
from kvd.protocol.wire import unpack_block_ids
from kvd.service import promotion
from tests.service.harness import Attached, expect, names, reserved_blocks
from tests.service.tiers import TieredClient, TieredHouse, content
from tests.support.dict_tier import DictTier

PROMPT = names("a", "b", "c", "d")


@pytest.fixture
def house() -> Iterator[TieredHouse]:
    house = TieredHouse()
    yield house
    house.check()
    house.close()


@pytest.mark.parametrize("how", ["dies", "takes too long"])
def test_copies_ask_again_for_memory_when_who_came_before_has_gone(
    house: TieredHouse, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    assert house.service.below is not None
    told = []
    for copies in (house.service.below.promotions, house.service.below.write_back):
        monkeypatch.setattr(copies, "memory_ready", lambda copies=copies: told.append(type(copies).__name__))
    (client,) = opened(house)
    house.stock.gives = False
    assert client.reserve(1) is None
    told.clear()
    if how == "dies":
        client.die()
    else:
        house.pass_time(3.0)
    assert set(told) == {"Promotions", "WriteBack"}


def opened(house: TieredHouse, count: int = 1) -> list[TieredClient]:
    clients = [house.client() for _ in range(count)]
    for client in clients:
        client.open()
    return clients


def attached(client: TieredClient) -> Attached:
    return Attached(client, expect(Begun, client.answer()))


def test_a_begin_brings_up_what_is_below(house: TieredHouse) -> None:  # case C5
    (client,) = opened(house)
    house.put_below(client, PROMPT[:3])
    assert client.try_begin(PROMPT, 5) is None
    assert len(house.mover.waiting(Lookup)) == 1
    house.run_mover()
    begun = attached(client)
    assert (begun.reply.num_cached, begun.reply.num_announced, begun.reply.waited) == (3, 1, True)
    client.verify(begun, PROMPT)
    client.release(begun.cached, begun.reserved, PROMPT)
    assert house.pool.num_uncopied == 0  # they still have their copy below
    assert house.service.below is not None
    assert len(house.service.below.promotions) == 0


def test_a_whole_resident_prefix_asks_nobody(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(PROMPT)
    house.run_mover()
    client.begin(PROMPT)
    assert not house.mover.waiting(Lookup)


def test_what_nobody_has_below_costs_one_question(house: TieredHouse) -> None:
    (client,) = opened(house)
    assert client.try_begin(PROMPT) is None
    assert house.run_mover() == 1
    assert attached(client).reply.num_announced == 4


def test_the_prefix_is_cut_at_a_gap_and_goes_on_behind_it_once_that_is_filled(house: TieredHouse) -> None:  # case C7
    (client,) = opened(house)
    house.put_below(client, [PROMPT[0], PROMPT[1], PROMPT[3]])
    client.try_begin(PROMPT)
    house.run_mover()
    begun = attached(client)
    assert begun.reply.num_cached == 2
    house.write(client, begun.reserved[0], content(PROMPT[2]))
    third = client.seal(begun.reserved[:1], PROMPT[2:3])
    client.release(begun.cached + third, begun.reserved[1:], PROMPT)
    client.try_begin(PROMPT)
    house.run_mover()
    again = attached(client)
    assert again.reply.num_cached == 4
    client.verify(again, PROMPT)


def test_who_does_not_wait_gets_the_resident_part_and_the_rest_comes_up_behind(house: TieredHouse) -> None:
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    begun = client.begin(PROMPT, wait_s=0.0, announce=False)
    assert (begun.reply.num_cached, begun.reply.waited) == (0, False)
    client.release(reserved=begun.reserved)
    house.run_mover(Lookup)
    assert [job.rank for job in house.mover.waiting(Fill)] == [Rank.FILL] * 4
    house.run_mover()
    assert client.begin(PROMPT, wait_s=0.0).reply.num_cached == 4


def test_prefetch_answers_at_once_and_brings_it_up(house: TieredHouse) -> None:
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    expect(Done, client.ask(requests.Prefetch, 1, pack_hashes(PROMPT)))
    house.run_mover()
    assert client.match(PROMPT) == 4


def test_a_reader_that_comes_while_a_block_is_promoted_waits_for_that_one_copy(house: TieredHouse) -> None:  # case C2
    first, second = opened(house, 2)
    house.put_below(first, PROMPT)
    first.try_begin(PROMPT)
    house.run_mover(Lookup)
    assert second.try_begin(PROMPT) is None
    assert not house.mover.waiting(Lookup)
    assert house.run_mover() == 4
    for client in (first, second):
        assert attached(client).reply.num_cached == 4
        client.verify(attached(client), PROMPT)
    assert attached(first).cached == attached(second).cached


def test_a_reader_makes_a_promotion_ahead_of_need_urgent(house: TieredHouse) -> None:
    first, second = opened(house, 2)
    house.put_below(first, PROMPT)
    first.ask(requests.Prefetch, 1, pack_hashes(PROMPT))
    house.run_mover(Lookup)
    second.try_begin(PROMPT)
    assert [job.rank for job in house.mover.waiting(Fill)] == [Rank.WANTED_FILL] * 4


def test_somebody_computing_it_wins_over_asking_below(house: TieredHouse) -> None:
    first, second = opened(house, 2)
    first.try_begin(PROMPT[:1])
    house.run_mover()
    house.put_below(first, PROMPT)
    assert second.try_begin(PROMPT) is None
    assert not house.mover.waiting(Lookup)
    block = attached(first).reserved[0]
    house.write(first, block, content(PROMPT[0]))
    first.seal([block], PROMPT[:1])
    house.run_mover()
    assert attached(second).reply.num_cached == 4


@pytest.mark.parametrize(
    "error", [BlockMissing("expired"), BlockCorrupt("flipped", cause="bad-checksum"), TierUnavailable("gone")]
)
def test_a_copy_that_fails_cuts_the_prefix_there(house: TieredHouse, error: Exception) -> None:  # case C1
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT)
    house.run_mover(Lookup)
    first, second, *rest = house.mover.waiting(Fill)
    house.do(first)
    house.tier.fail_next("get", error)  # type: ignore[arg-type]
    house.do(second)
    assert attached(client).reply.num_cached == 1
    assert all(job.cancelled for job in rest), "nobody wants what follows a gap"


def test_a_tier_that_hangs_costs_a_begin_its_patience_and_no_more(house: TieredHouse) -> None:  # case C1
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    started_s = house.clock.now_s
    client.try_begin(PROMPT)
    house.pass_time(1.0)
    assert attached(client).reply.num_cached == 0
    (lookup,) = house.mover.waiting(Lookup)
    house.do(lookup)  # an answer that comes too late starts nothing
    assert not house.mover.waiting(Fill)
    assert house.clock.now_s - started_s == 1.0


def test_a_begin_never_waits_longer_than_a_tenth_of_a_second_without_progress(house: TieredHouse) -> None:  # case C1
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT)
    house.run_mover(Lookup)
    stuck, *others = house.mover.waiting(Fill)
    house.mover.begin(stuck)
    house.pass_time(0.1)
    begun = attached(client)
    assert begun.reply.num_cached == 0
    assert all(job.cancelled for job in others)
    house.mover.end(stuck)
    house.mover_done()
    assert client.match(PROMPT) == 1


def test_each_block_that_comes_renews_the_patience(house: TieredHouse) -> None:
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT)
    house.run_mover(Lookup)
    for job in house.mover.waiting(Fill):
        house.pass_time(0.07)
        assert client.answer() is None
        house.do(job)
    assert attached(client).reply.num_cached == 4


def test_a_caller_may_wait_longer(house: TieredHouse) -> None:
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT, wait_s=5.0)
    house.pass_time(4.9)
    assert client.answer() is None
    house.run_mover()
    assert attached(client).reply.num_cached == 4


def test_a_tier_that_is_down_is_not_asked(house: TieredHouse) -> None:
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    house.tier.down_for_s = 3.0
    begun = client.begin(PROMPT)
    assert (begun.reply.num_cached, begun.reply.waited) == (0, False)
    assert not house.mover.waiting(Lookup)


@pytest.mark.parametrize("when", ["asking", "waiting", "copying", "copied"])
def test_an_abort_while_blocks_come_up_leaves_nothing_behind(house: TieredHouse, when: str) -> None:  # case B11
    client, other = opened(house, 2)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT)
    if when != "asking":
        house.run_mover(Lookup)
    fills = house.mover.waiting(Fill)
    if when == "copying":
        for job in fills:
            house.mover.begin(job)
    if when == "copied":
        for job in fills[:3]:
            house.mover.do(job)
    client.die()
    house.check()
    for job in reversed(house.mover.running(Fill)):
        house.mover.end(job)
        house.mover_done()
    house.run_mover()
    (status,) = house.pools.pool_statuses()
    assert (status.num_filling, status.num_references) == (0, 0)
    assert house.service.below is not None
    assert len(house.service.below.promotions) == 0
    other.try_begin(PROMPT)
    house.run_mover()
    assert attached(other).reply.num_cached == 4
    other.verify(attached(other), PROMPT)


def test_a_reader_goes_on_by_itself_when_the_one_whose_promotion_it_shared_dies(house: TieredHouse) -> None:  # case B11
    first, second = opened(house, 2)
    house.put_below(first, PROMPT)
    first.try_begin(PROMPT)
    house.run_mover(Lookup)
    second.try_begin(PROMPT)
    first.die()
    house.run_mover()
    assert attached(second).reply.num_cached == 4


def test_a_promotion_evicts_only_what_nobody_references(house: TieredHouse) -> None:  # case C4
    holder, reader = opened(house, 2)
    held = names(*"klmnop")  # six of the eight blocks
    blocks = holder.publish(held, keep=True)
    holder.publish(names("x", "y"))  # and two that may go
    house.put_below(reader, PROMPT)
    reader.try_begin(PROMPT[:2])
    house.run_mover()
    assert attached(reader).reply.num_cached == 2
    assert holder.match(names("x")) == 0
    for block, chain_hash in zip(blocks, held, strict=True):
        assert house.bytes_of(holder, block) == content(chain_hash)


def test_without_room_the_caller_gets_what_is_resident(house: TieredHouse) -> None:  # case C4
    holder, reader = opened(house, 2)
    holder.publish(names(*"klmnopq"), keep=True)  # one block is left
    house.put_below(reader, PROMPT)
    reader.ask(requests.Prefetch, 1, pack_hashes(PROMPT))
    house.run_mover()
    assert reader.match(PROMPT) == 1
    assert reader.begin(PROMPT[:1]).reply.num_cached == 1


def test_what_was_brought_up_stays_until_its_waiter_takes_it(house: TieredHouse) -> None:
    first, second = opened(house, 2)
    house.put_below(first, PROMPT)
    first.try_begin(PROMPT)
    house.run_mover(Lookup)
    *early, last = house.mover.waiting(Fill)
    house.do(*early)
    # Promoted blocks have a copy below, so they would be the first to be evicted for this.
    assert len(reserved_blocks(second, second.reserve(4))) == 4
    house.do(last)
    assert attached(first).reply.num_cached == 4
    first.verify(attached(first), PROMPT)


def test_after_a_drop_promotion_the_only_copy_is_here() -> None:
    house = TieredHouse(after_promote="drop")
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT)
    house.run_mover()
    begun = attached(client)
    client.verify(begun, PROMPT)
    client.release(begun.cached)
    assert not house.held_below()
    assert house.pool.num_uncopied == 4
    house.close()


def test_promotions_wait_for_memory_that_is_being_made(house: TieredHouse) -> None:
    house.stock.gives = False
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT, wait_s=2.0)
    house.run_mover()
    assert client.answer() is None
    assert house.stock.num_requested == 1
    house.stock.make(1)
    house.memory_ready()
    house.run_mover()
    assert attached(client).reply.num_cached == 4


def test_match_tells_how_far_each_tier_reaches_and_pins_nothing() -> None:
    house = TieredHouse(tiers=[DictTier(name="host"), DictTier(name="redis")])
    (client,) = opened(house)
    client.publish(PROMPT[:1])
    house.put_below(client, PROMPT[1:2], level=0)
    house.put_below(client, PROMPT[2:], level=1)
    matched = client.reach(PROMPT)
    assert (matched.num_resident, matched.tiers, matched.reach) == (1, ["host", "redis"], [2, 4])
    assert house.pools.pool_statuses()[0].num_references == 0
    client.try_begin(PROMPT)
    house.run_mover()
    assert attached(client).reply.num_cached == 4
    house.close()


def test_match_answers_without_the_tiers_when_they_hang(house: TieredHouse) -> None:
    (client,) = opened(house)
    assert client.ask(requests.Match, 1, pack_hashes(PROMPT)) is None
    (lookup,) = house.mover.waiting(Lookup)
    house.mover.begin(lookup)
    house.pass_time(0.1)
    matched = client.answer()
    assert (matched.num_resident, matched.reach) == (0, [])  # type: ignore[union-attr]
    house.mover.end(lookup)
    house.mover_done()


def test_a_begin_that_waits_for_another_session_gives_up_what_it_gathered(house: TieredHouse) -> None:  # case B13
    first, second = opened(house, 2)
    house.put_below(first, PROMPT[:2])
    first.try_begin(PROMPT[2:3])  # announces c as the first block of another chain would
    house.run_mover()
    second.try_begin(PROMPT)
    house.run_mover()
    assert second.answer() is None
    (status,) = house.pools.pool_statuses()
    assert status.num_references == 0
    first.die()
    house.run_mover()
    assert attached(second).reply.num_cached == 2


def test_the_ids_of_promoted_blocks_are_granted_first(house: TieredHouse) -> None:
    (client,) = opened(house)
    house.put_below(client, PROMPT)
    client.try_begin(PROMPT)
    house.run_mover()
    client.may_map(unpack_block_ids(expect(Begun, client.answer()).blocks))


def test_what_nobody_waits_for_is_asked_within_a_bound(  # case B10
    house: TieredHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "MAX_ASKED", 5)
    (client,) = opened(house)

    def asked() -> int:
        return sum(len(lookup.keys) for lookup in house.mover.waiting(Lookup))

    def prefetch(*words: str) -> None:
        expect(Done, client.ask(requests.Prefetch, 1, pack_hashes(names(*words))))

    prefetch(*"abcdefg")
    assert asked() == 7, "one that is alone may be as long as it likes"
    prefetch("h")
    assert asked() == 7
    client.try_begin(names("i"), 2)
    assert asked() == 8, "somebody waits for this one"
    house.run_mover(Lookup)
    prefetch(*"abc")
    prefetch("h", "i")
    prefetch("k")
    assert asked() == 5
