from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvd.protocol.replies import Begun, Done
from tests.service.harness import SETTINGS, Client, House, error_code, expect, names, reserved_blocks


def opened(house: House, count: int) -> list[Client]:
    clients = [house.client() for _ in range(count)]
    for client in clients:
        client.open()
    return clients


def begun(client: Client, request_id: int | None = None) -> Begun:
    return expect(Begun, client.answer(request_id))


def test_the_second_waits_for_the_firsts_computation(house: House) -> None:  # case B8
    first, second = opened(house, 2)
    prompt = names("a", "b")
    blocks = first.begin(prompt).reserved
    assert second.try_begin(prompt) is None
    first.seal(blocks[:1], prompt[:1])
    assert second.answer() is None  # a is there, b still comes
    first.seal(blocks[1:], prompt[1:])
    assert (begun(second).num_cached, begun(second).waited) == (2, True)
    assert house.service.next_deadline_s is None


def test_when_the_first_dies_half_way_the_second_goes_on_at_once(house: House) -> None:  # case B8
    first, second, third = opened(house, 3)
    prompt = names("a", "b")
    first.seal(first.begin(prompt).reserved[:1], prompt[:1])
    assert second.try_begin(prompt) is None
    assert third.try_begin(prompt) is None
    first.die()
    # The second computes what is missing, and the third now waits for the second.
    assert (begun(second).num_cached, begun(second).num_announced) == (1, 1)
    assert third.answer() is None
    block = int.from_bytes(begun(second).blocks[4:], "little")
    second.seal([block], prompt[1:])
    assert begun(third).num_cached == 2


def test_withdrawn_announcements_end_the_wait_too(house: House) -> None:
    first, second = opened(house, 2)
    prompt = names("a")
    first.begin(prompt)
    assert second.try_begin(prompt) is None
    expect(Done, first.release(hashes=prompt))
    assert begun(second).num_announced == 1


def test_the_default_wait_is_cut_as_any_other() -> None:
    house = House(settings=replace(SETTINGS, default_wait_s=100.0))
    first, second = opened(house, 2)
    first.begin(names("a"))
    assert second.try_begin(names("a")) is None
    house.pass_time(SETTINGS.max_wait_s - 0.1)
    assert second.answer() is None
    house.pass_time(0.2)
    assert begun(second).num_cached == 0
    house.close()


@pytest.mark.parametrize(("wait_s", "bound_s"), [(None, 10.0), (2.5, 2.5), (1000.0, 60.0)])
def test_every_wait_has_a_bound_and_then_computes_for_itself(
    house: House, wait_s: float | None, bound_s: float
) -> None:
    first, second = opened(house, 2)
    prompt = names("a")
    first.begin(prompt)
    assert second.try_begin(prompt, wait_s=wait_s) is None
    assert house.service.next_deadline_s == house.clock.now_s + bound_s
    house.pass_time(bound_s - 0.001)
    assert second.answer() is None
    house.pass_time(0.001)
    assert (begun(second).num_cached, begun(second).num_announced, begun(second).waited) == (0, 0, True)


def test_who_does_not_want_to_wait_never_does(house: House) -> None:
    first, second = opened(house, 2)
    first.begin(names("a"))
    reply = expect(Begun, second.try_begin(names("a"), wait_s=0.0))
    assert (reply.num_announced, reply.waited) == (0, False)


def test_crosswise_announcements_are_refused_rather_than_waited_for(house: House) -> None:  # case B13
    one, two = opened(house, 2)
    x, y = names("x", "y")
    one.begin([x])
    two.begin([y])
    assert error_code(one.try_begin([y])) == "would-wait"
    assert error_code(two.try_begin([x])) == "would-wait"


def test_crosswise_waits_on_purpose_end_within_their_bounds(house: House) -> None:  # case B13
    one, two = opened(house, 2)
    x, y = names("x", "y")
    one.begin([x])
    two.begin([y])
    assert one.try_begin([y], wait_s=5.0) is None
    assert two.try_begin([x], wait_s=7.0) is None
    house.pass_time(7.0)
    assert begun(one).num_cached == begun(two).num_cached == 0


def test_holders_of_reservations_who_want_more_are_told_at_once(house: House) -> None:  # case B13
    one, two = opened(house, 2)
    one.begin([], 4)
    two.begin([], 4)
    assert error_code(one.reserve(1)) == "out-of-blocks"
    assert error_code(two.reserve(1)) == "out-of-blocks"
    assert house.service.next_deadline_s is None


def test_a_waiting_begin_holds_nothing(house: House) -> None:
    first, second = opened(house, 2)
    prompt = names("a", "b")
    first.begin(prompt)
    second.try_begin(prompt, 8)
    seen = house.service.snapshot().clients[1]
    assert (seen.num_references, seen.num_reserved, seen.num_announced, seen.num_waiting) == (0, 0, 0, 1)


def test_a_full_pool_fails_at_once_naming_the_holders(house: House) -> None:  # case B7
    holder, other = opened(house, 2)
    prompt = names(*"abcdefgh")
    holder.seal(holder.begin(prompt).reserved, prompt)
    for reply in (other.try_begin([], 1), other.reserve(1)):
        assert error_code(reply) == "out-of-blocks"
        assert "session 1" in reply.message  # type: ignore[union-attr]


def test_a_full_pool_is_waited_for_up_to_the_callers_bound(house: House) -> None:  # case B7
    holder, other = opened(house, 2)
    blocks = holder.begin([], 8).reserved
    assert other.try_begin([], 2, wait_s=4.0) is None
    house.pass_time(3.9)
    assert other.answer() is None
    house.pass_time(0.1)
    assert error_code(other.answer()) == "out-of-blocks"
    assert other.try_begin([], 2, wait_s=4.0) is None
    holder.release(reserved=blocks[:1])
    assert other.answer() is None
    holder.release(reserved=blocks[1:2], ack=False)
    assert begun(other).num_cached == 0


def test_those_who_wait_for_blocks_are_served_in_their_order(house: House) -> None:
    holder, one, two = opened(house, 3)
    blocks = holder.begin([], 8).reserved
    assert one.try_begin([], 3, wait_s=9.0) is None
    assert two.try_begin([], 1, wait_s=9.0) is None
    holder.release(reserved=blocks[:2])
    assert two.answer() is None  # small, but not first
    holder.die()
    assert begun(one)
    assert begun(two)


def test_a_dead_readers_references_are_back_at_once(make_house: Callable[..., House]) -> None:  # case B1
    house = make_house(250)
    reader, other = opened(house, 2)
    prompt = names(*map(str, range(1000)))
    reader.release(reader.seal(reader.begin(prompt).reserved, prompt))
    assert len(reader.begin(prompt).cached) == 1000
    assert error_code(other.try_begin([], 1000)) == "out-of-blocks"
    reader.die()
    assert house.pools.pool_statuses()[0].num_references == 0
    assert len(other.begin([], 1000).reserved) == 1000


def test_a_dead_writers_reservation_is_free_at_once_and_never_seen(house: House) -> None:  # case B2
    writer, other = opened(house, 2)
    prompt = names(*"abcdefgh")
    blocks = writer.begin(prompt).reserved
    writer.die()
    assert other.match(prompt) == 0
    attached = other.begin(prompt)
    assert attached.cached == []
    assert sorted(attached.reserved) == sorted(blocks)


def test_waits_of_the_dead_vanish(house: House) -> None:  # case B13
    first, second, third = opened(house, 3)
    prompt = names("a")
    (block,) = first.begin(prompt).reserved
    assert second.try_begin(prompt) is None
    assert third.try_begin(prompt) is None
    second.die()
    first.seal([block], prompt)
    assert second.replies[-1:] == [second.replies[0]]  # only the answer to its open
    assert begun(third).num_cached == 1
    assert house.service.next_deadline_s is None


def test_queued_requests_of_the_dead_bring_nothing_back(house: House) -> None:  # case B16
    dead, other = opened(house, 2)
    dead.die()
    for _ in range(500):
        assert dead.try_begin(names("a"), 2) is None
        assert dead.reserve(1) is None
    snapshot = house.service.snapshot()
    assert [client.session for client in snapshot.clients] == [other.session]
    assert snapshot.counters["late_requests"] == 1000
    assert snapshot.pools[0].num_reserved == 0
    dead.die()  # twice is once


def test_a_slow_reader_keeps_its_bytes(house: House) -> None:  # case B6
    reader, other = opened(house, 2)
    prompt = names("a", "b")
    blocks = reader.seal(reader.begin(prompt).reserved, prompt)
    house.pass_time(30 * 24 * 3600.0)
    assert len(other.begin(names(*"cdefgh")).reserved) == 6
    assert error_code(other.reserve(1)) == "out-of-blocks"
    expect(Done, reader.release(blocks))
    assert len(reserved_blocks(other, other.reserve(2))) == 2


def test_many_waiters_of_one_hash_are_all_served_by_one_seal(house: House) -> None:
    first, *others = opened(house, 20)
    prompt = names("a")
    (block,) = first.begin(prompt).reserved
    for other in others:
        assert other.try_begin(prompt) is None
    first.seal([block], prompt)
    assert all(begun(other).num_cached == 1 for other in others)
