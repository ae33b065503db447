"""What blobs ask of the daemon: all blocks or none, the last of many keys, and forgetting one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvd.blobs import BODY_ENGINE
from kvd.block import ChainHash
from kvd.errors import TierUnavailable
from kvd.hashing import pack_hashes
from kvd.mover import Drop, Lookup, Spill
from kvd.protocol import requests
from kvd.protocol.replies import Begun, Forgotten, FoundLast, Reply
from tests.service.harness import SETTINGS, Attached, House, error_code, expect, names
from tests.service.tiers import TieredClient, TieredHouse

FOUR = names(*"abcd")


@pytest.fixture
def house() -> Iterator[TieredHouse]:
    house = TieredHouse(low_watermark=0.0, high_watermark=0.0)
    yield house
    house.check()
    house.close()


@pytest.fixture
def client(house: TieredHouse) -> TieredClient:
    client = house.client()
    client.open(engine=BODY_ENGINE)
    return client


def begin_whole(client: TieredClient, hashes: Sequence[ChainHash], **more: object) -> Reply | None:
    return client.try_begin(hashes, announce=False, whole=True, **more)


def find_last(client: TieredClient, hashes: Sequence[ChainHash]) -> Reply | None:
    return client.ask(requests.FindLast, 1, pack_hashes(hashes))


def forget(client: TieredClient, hashes: Sequence[ChainHash], **more: object) -> Reply | None:
    return client.ask(requests.Forget, 1, pack_hashes(hashes), **more)


def test_a_whole_prefix_is_attached(client: TieredClient) -> None:
    client.publish(FOUR)
    attached = Attached(client, expect(Begun, begin_whole(client, FOUR)))
    client.verify(attached, FOUR)
    assert (len(attached.cached), attached.reserved) == (4, [])
    client.release(attached.cached)
    assert client.house.service.sessions[client.session].tokens_saved == 0, "these are bytes, not tokens"


def test_less_than_the_whole_is_told_and_nothing_is_held(house: TieredHouse, client: TieredClient) -> None:
    client.publish(FOUR[:2])
    assert begin_whole(client, FOUR) is None
    house.run_mover()
    reply = expect(Begun, client.answer())
    assert (reply.num_cached, reply.blocks, reply.num_announced) == (2, b"", 0)
    (status,) = client.status().snapshot.clients
    assert (status.num_references, status.num_reserved, status.num_announced) == (0, 0, 0)


def test_a_whole_begin_takes_no_room_from_others(house: TieredHouse, client: TieredClient) -> None:
    """All eight blocks are cached; what is missing must not evict any of them."""
    client.publish(names(*"efgh1234"))
    begin_whole(client, FOUR, wait_s=0.0)
    assert client.match(names(*"efgh1234")) == 8


@pytest.mark.parametrize(("most", "num_blocks"), [(3, 4), (4, 5)])
def test_whole_means_all(client: TieredClient, most: int, num_blocks: int) -> None:
    reply = client.try_begin(FOUR, num_blocks, max_cached=most, whole=True)
    assert error_code(reply) == "invalid-request"


def test_blocks_here_and_blocks_below_are_brought_together(house: TieredHouse, client: TieredClient) -> None:
    """b and d are here and nowhere else: no gap, though no tier has them."""
    client.publish([FOUR[1]])
    client.publish([FOUR[3]])
    house.put_below(client, [FOUR[0], FOUR[2]])
    assert begin_whole(client, FOUR) is None
    house.run_mover()
    attached = Attached(client, expect(Begun, client.answer()))
    assert len(attached.cached) == 4
    client.verify(attached, FOUR)
    client.release(attached.cached)


def test_the_last_of_many_is_found_here_without_asking(house: TieredHouse, client: TieredClient) -> None:
    client.publish([FOUR[3]])
    house.run_mover()
    assert expect(FoundLast, find_last(client, FOUR)).place == 3
    assert not house.mover.waiting(Lookup)


def test_the_last_of_many_is_found_below(house: TieredHouse, client: TieredClient) -> None:
    client.publish([FOUR[0]])
    house.run_mover()
    house.put_below(client, [FOUR[2]])
    assert find_last(client, FOUR) is None
    (lookup,) = house.mover.waiting(Lookup)
    assert [key.chain_hash for key in lookup.keys] == FOUR[1:], "what is here already need not be asked"
    house.do(lookup)
    assert expect(FoundLast, client.answer()).place == 2


@pytest.mark.parametrize("resident", [[], FOUR[:2]])
def test_a_tier_that_hangs_costs_a_bounded_wait(
    house: TieredHouse, client: TieredClient, resident: list[ChainHash]
) -> None:
    if resident:
        client.publish(resident)
    house.put_below(client, FOUR)
    assert find_last(client, FOUR) is None
    house.pass_time(1.0)
    assert expect(FoundLast, client.answer()).place == len(resident) - 1


def test_nothing_is_found_where_nothing_is(house: TieredHouse, client: TieredClient) -> None:
    assert find_last(client, FOUR) is None
    house.run_mover()
    assert expect(FoundLast, client.answer()).place == -1
    assert expect(FoundLast, find_last(client, [])).place == -1


def test_what_is_forgotten_is_gone_here_and_below(house: TieredHouse, client: TieredClient) -> None:
    client.publish(FOUR)
    house.put_below(client, FOUR)
    assert forget(client, FOUR[1:3]) is None, "answered once the tiers were told"
    house.run_mover()
    assert expect(Forgotten, client.answer()).num_blocks == 2
    assert house.held_below() == {FOUR[0], FOUR[3]}
    assert client.match(FOUR[:1]) == 1
    assert client.match(FOUR[3:]) == 1
    assert client.match(FOUR[1:2]) == 0


def test_the_tiers_keep_theirs_if_asked_to(house: TieredHouse, client: TieredClient) -> None:
    client.publish(FOUR)
    house.put_below(client, FOUR)
    assert expect(Forgotten, forget(client, FOUR, below=False)).num_blocks == 4
    assert house.held_below() == set(FOUR)


def test_a_tier_that_is_down_holds_nobody_up(house: TieredHouse, client: TieredClient) -> None:
    client.publish(FOUR)
    house.put_below(client, FOUR)
    house.tier.fail_always("delete", TierUnavailable("gone"))
    forget(client, FOUR)
    house.run_mover(Drop)
    assert expect(Forgotten, client.answer()).num_blocks == 4
    assert house.held_below() == set(FOUR)


def test_a_copy_under_way_does_not_bring_back_what_was_forgotten(house: TieredHouse, client: TieredClient) -> None:
    client.publish(FOUR)
    house.service.below.spilling.spill_all(house.pool)
    copies = house.mover.waiting(Spill)
    for job in copies:
        house.mover.begin(job)
    forget(client, FOUR)
    house.run_mover(Drop)
    for job in copies:
        house.mover.end(job)
    assert house.held_below() & set(FOUR), "the copies ended after the tier was told"
    house.run_mover()
    assert not house.held_below()


def test_a_reader_keeps_the_bytes_of_what_is_forgotten(house: TieredHouse, client: TieredClient) -> None:
    client.publish(FOUR)
    attached = Attached(client, expect(Begun, begin_whole(client, FOUR)))
    forget(client, FOUR)
    house.run_mover()
    client.verify(attached, FOUR)
    client.release(attached.cached)
    assert house.pool.store.num_sealed == 0


def test_a_promotion_of_what_is_forgotten_delivers_nothing(house: TieredHouse, client: TieredClient) -> None:
    house.put_below(client, FOUR)
    assert begin_whole(client, FOUR, wait_s=30.0) is None
    waiting = client.latest
    house.run_mover(Lookup)
    forget(client, FOUR)
    house.run_mover()
    assert expect(Begun, client.answer(waiting)).blocks == b""
    assert client.match(FOUR) == 0


def test_keys_and_values_cannot_be_forgotten_one_by_one(house: TieredHouse, client: TieredClient) -> None:
    other = house.client()
    other.open()
    other.publish(FOUR)
    assert error_code(forget(other, FOUR)) == "invalid-request"
    assert other.match(FOUR) == 4


def test_blocks_of_another_namespace_are_passed_over(house: TieredHouse, client: TieredClient) -> None:
    """Two namespaces of one pool: a hash of one says nothing about the other."""
    other = house.client()
    other.open()
    other.publish(FOUR)
    forget(client, FOUR)
    house.run_mover()
    assert expect(Forgotten, client.answer()).num_blocks == 0
    assert other.match(FOUR) == 4


def test_another_tenant_neither_finds_nor_forgets() -> None:
    house = House(settings=replace(SETTINGS, isolation="uid"))
    mine, theirs = house.client(uid=1000), house.client(uid=2000)
    for client in (mine, theirs):
        client.open(engine=BODY_ENGINE)
    attached = mine.begin(FOUR)
    mine.release(mine.seal(attached.reserved, FOUR))
    assert expect(FoundLast, theirs.ask(requests.FindLast, 1, pack_hashes(FOUR))).place == -1
    assert expect(Forgotten, theirs.ask(requests.Forget, 1, pack_hashes(FOUR))).num_blocks == 0
    assert mine.match(FOUR) == 4
    house.check()
    house.close()


def test_without_a_tier_it_works_at_once() -> None:
    house = House()
    client = house.client()
    client.open(engine=BODY_ENGINE)
    attached = client.begin(FOUR)
    client.release(client.seal(attached.reserved, FOUR))
    assert expect(FoundLast, client.ask(requests.FindLast, 1, pack_hashes(FOUR + names("x")))).place == 3
    assert expect(Forgotten, client.ask(requests.Forget, 1, pack_hashes(FOUR))).num_blocks == 4
    assert expect(FoundLast, client.ask(requests.FindLast, 1, pack_hashes(FOUR))).place == -1
    house.check()
    house.close()
