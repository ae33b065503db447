"""Blocks go down before they must go, never at the price of anything that waits, and a failure changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import xxhash

from kvd.block import NamespaceDigest
from kvd.errors import StaleGeneration, TierFull, TierUnavailable
from kvd.mover import Spill
from kvd.protocol import requests
from kvd.protocol.replies import Begun, Spilling
from tests.service.harness import Attached, expect, names
from tests.service.tiers import TieredClient, TieredHouse, content

EIGHT = names(*"abcdefgh")


@pytest.fixture
def house() -> Iterator[TieredHouse]:
    """Eight blocks; spilling begins when fewer than two can be had for nothing, and ends at four."""
    house = TieredHouse(low_watermark=0.25, high_watermark=0.5)
    yield house
    house.check()
    house.close()


def opened(house: TieredHouse, count: int = 1) -> list[TieredClient]:
    clients = [house.client() for _ in range(count)]
    for client in clients:
        client.open()
    return clients


def test_nothing_is_copied_while_there_is_room(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT[:6])
    assert not house.mover.waiting(Spill)


def test_between_the_watermarks_the_coldest_blocks_go_down(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT[:4])
    client.publish(EIGHT[4:7])
    assert house.run_mover(Spill) == 3
    # One block is free; three more that can be had for nothing make four. A sequence goes tail first.
    assert house.held_below() == set(EIGHT[1:4])
    assert house.pool.num_expendable == 4
    client.publish(names("x", "y", "z", "w"))
    assert client.match(EIGHT[:1]) == 1, "what had a copy went first"


def test_an_allocation_never_waits_for_a_copy(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT)
    for job in house.mover.waiting(Spill):
        house.mover.begin(job)
    begun = client.begin(names("x", "y", "z", "w"), wait_s=0.0)
    assert len(begun.reserved) == 4
    for job in house.mover.running(Spill):
        house.mover.end(job)
    house.mover_done()


def test_a_reader_that_comes_while_a_block_is_spilled_shares_it(house: TieredHouse) -> None:  # case C2
    first, second = opened(house, 2)
    first.publish(EIGHT)
    running = house.mover.waiting(Spill)
    for job in running:
        house.mover.begin(job)
    begun = second.begin(EIGHT)
    assert begun.reply.num_cached == 8
    second.verify(begun, EIGHT)
    for job in running:
        house.mover.end(job)
    house.mover_done()
    second.verify(begun, EIGHT)
    second.release(begun.cached)
    assert all(house.below.blocks[key] == content(key.chain_hash) for key in house.below.blocks)


@pytest.mark.parametrize("error", [TierFull("full"), TierUnavailable("gone")])
def test_a_failed_copy_leaves_the_block_and_pressure_drops_it_counted(  # case C3
    house: TieredHouse, error: TierUnavailable
) -> None:
    (client,) = opened(house)
    house.tier.fail_always("put", error)
    client.publish(EIGHT)
    house.run_mover()
    assert client.match(EIGHT) == 8
    assert not house.held_below()
    begun = client.begin(names("x", "y"), wait_s=0.0)
    assert len(begun.reserved) == 2
    (status,) = house.pools.pool_statuses()
    assert status.counters["dropped_unspilled"] == 2
    assert status.counters["failed_spills"] > 0
    assert client.match(EIGHT) == 6  # the tail went


def test_after_a_failure_it_rests_and_then_resumes_by_itself(house: TieredHouse) -> None:  # case C1
    (client,) = opened(house)
    house.tier.fail_always("put", TierUnavailable("gone"))
    client.publish(EIGHT)
    house.run_mover(Spill)
    assert not house.mover.waiting(Spill), "no storm of attempts"
    house.tier.heal()
    house.pass_time(0.5)
    assert house.run_mover(Spill) == 4
    assert len(house.held_below()) == 4


def test_a_copy_whose_acknowledgement_is_lost_is_simply_made_again(house: TieredHouse) -> None:  # case C3
    (client,) = opened(house)
    client.publish(EIGHT)
    house.tier.fail_next("put", TierUnavailable("reset"), after=True)
    house.run_mover(Spill)
    house.pass_time(0.5)
    house.run_mover(Spill)
    assert len(house.held_below()) == 4
    assert house.pool.num_expendable == 4


def test_no_more_bytes_than_allowed_are_on_their_way_down() -> None:
    house = TieredHouse(low_watermark=0.9, high_watermark=1.0, max_spilling_nbytes=2 * 4096)
    (client,) = opened(house)
    client.publish(EIGHT)
    assert len(house.mover.waiting(Spill)) == 2
    assert house.run_mover(Spill) == 8
    house.close()


def test_write_through_copies_a_block_as_soon_as_it_is_sealed() -> None:
    house = TieredHouse(spill="write_through")
    (client,) = opened(house)
    blocks = client.publish(EIGHT[:2], keep=True)
    assert house.run_mover(Spill) == 2
    assert house.held_below() == set(EIGHT[:2])
    client.release(blocks)
    assert house.pool.num_uncopied == 0
    house.close()


def test_what_waits_for_its_generation_costs_nothing_and_keeps_nobody_waiting(  # case C1
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = TieredHouse(spill="write_through")
    house.tier.fail_always("generation", TierUnavailable("gone"))
    (unknown,) = opened(house)
    house.tier.heal()
    known = house.client()
    known.open(model="another")
    begun = []
    monkeypatch.setattr(
        house.pool, "begin_spill", lambda block: begun.append(block) or type(house.pool).begin_spill(house.pool, block)
    )
    unknown.publish(EIGHT[:4])
    assert not begun
    (status,) = house.pools.pool_statuses()
    assert not status.counters["failed_spills"]
    known.publish(EIGHT[4:6])
    assert house.run_mover(Spill) == 2
    assert house.held_below() == set(EIGHT[4:6])
    house.pass_time(6.0)
    house.run_mover()
    assert house.held_below() == set(EIGHT[:6])
    house.close()


def test_on_second_hit_only_what_was_found_twice_goes_down() -> None:
    house = TieredHouse(spill="on_second_hit")
    (client,) = opened(house)
    client.publish(EIGHT[:4])
    client.publish(EIGHT[4:])
    for _ in range(2):
        assert house.run_mover(Spill) == 0
        client.release(client.begin(EIGHT[:2]).cached)
    assert house.run_mover(Spill) == 2
    assert house.held_below() == set(EIGHT[:2])
    house.close()


def test_a_block_that_is_not_what_its_writer_sealed_is_dropped_and_not_spread(house: TieredHouse) -> None:
    (client,) = opened(house)
    begun = client.begin(EIGHT, wait_s=0.0)
    for block, chain_hash in zip(begun.reserved, EIGHT, strict=True):
        house.write(client, block, content(chain_hash))
    checksums = b"".join(xxhash.xxh3_64_intdigest(content(one)).to_bytes(8, "little") for one in EIGHT)
    client.seal(begun.reserved, EIGHT, checksums)
    house.write(client, begun.reserved[7], content(b"a stray write"))
    client.release(begun.reserved)
    house.run_mover(Spill)
    assert EIGHT[7] not in house.held_below()
    assert client.match(EIGHT) == 7


def test_blocks_of_a_namespace_whose_generation_is_unknown_stay(house: TieredHouse) -> None:
    house.tier.fail_always("generation", TierUnavailable("gone"))
    (client,) = opened(house)
    client.publish(EIGHT)
    assert not house.mover.waiting(Spill)
    house.tier.heal()
    house.pass_time(6.0)
    house.run_mover()
    assert len(house.held_below()) == 4


def test_a_generation_that_the_tier_lost_is_learnt_anew(house: TieredHouse) -> None:  # case C1
    (client,) = opened(house)
    client.publish(EIGHT)
    house.tier.fail_next("put", StaleGeneration("restarted empty", cause="generation-lost"))
    house.run_mover()
    assert len(house.held_below()) == 4
    assert client.match(EIGHT) == 8, "nobody flushed anything"


def test_spill_all_on_request(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT[:5])
    assert client.ask(requests.Spill) is not None
    admin = house.client(uid=0)
    assert expect(Spilling, admin.ask(requests.Spill)).num_left == 5
    house.run_mover(Spill)
    assert expect(Spilling, admin.ask(requests.Spill)).num_left == 0
    assert house.held_below() == set(EIGHT[:5])


def test_a_stop_copies_the_newest_first_to_what_outlives_it(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT[:3])
    client.publish(EIGHT[3:5])
    client.die()
    order: list[bytes] = []

    def wait(_seconds: float) -> None:
        order.extend(job.key.chain_hash for job in house.mover.waiting(Spill))
        house.run_mover(Spill)

    house.service.drain(wait)
    assert house.held_below() == set(EIGHT[:5])
    assert order == [*EIGHT[3:5], *EIGHT[:3]]  # and of a sequence the head first


def test_a_stop_gives_up_on_a_tier_that_is_down(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT)
    client.die()
    house.tier.fail_always("put", TierUnavailable("gone"))
    house.tier.down_for_s = 5.0
    house.service.drain(lambda _seconds: house.do(*house.mover.waiting(Spill)))
    assert not house.held_below()


def test_a_stop_takes_no_longer_than_it_may() -> None:
    house = TieredHouse(drain_s=3.0)
    (client,) = opened(house)
    client.publish(EIGHT)
    client.die()
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        house.clock.now_s += seconds

    house.service.drain(wait)
    assert sum(waited) == pytest.approx(3.0)
    house.close()


def test_what_one_daemon_spilled_another_finds() -> None:  # case C8
    one = TieredHouse(spill="write_through")
    two = TieredHouse(tiers=one.inner)
    (writer,), (reader,) = opened(one), opened(two)
    writer.publish(EIGHT[:4])
    one.run_mover()
    reader.try_begin(EIGHT[:4])
    two.run_mover()
    begun = Attached(reader, expect(Begun, reader.answer()))
    assert begun.reply.num_cached == 4
    reader.verify(begun, EIGHT)
    assert {key.namespace for key in one.below.blocks} == {NamespaceDigest(writer.digest)}
    one.close()
    two.close()


def test_a_stop_does_not_try_a_full_tier_until_its_time_is_up(house: TieredHouse) -> None:
    (client,) = opened(house)
    client.publish(EIGHT)
    client.die()
    house.tier.fail_always("put", TierFull("full"))
    started_s = house.clock.now_s

    def wait(_seconds: float) -> None:
        if not house.run_mover(Spill):
            house.clock.now_s += 0.1  # the loop's heartbeat ends a wait early

    house.service.drain(wait)
    assert house.clock.now_s - started_s < 2.0


def test_write_through_tries_again_what_a_tier_did_not_take() -> None:  # case C1
    house = TieredHouse(spill="write_through")
    (client,) = opened(house)
    house.tier.fail_always("put", TierUnavailable("gone"))
    client.publish(EIGHT[:2])
    house.run_mover()
    house.tier.heal()
    house.pass_time(1.0)
    house.run_mover()
    assert house.held_below() == set(EIGHT[:2])
    house.close()
