"""Growth: memory that comes at once, later, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from kvd.protocol.replies import Begun
from kvd.service import ServiceSettings
from tests.service.harness import LAYOUT, SEGMENT_NBYTES, House, error_code, expect, names, reserved_blocks


def test_a_begin_waits_for_memory_that_is_being_made(house: House) -> None:
    house.stock.gives = False
    client = house.client()
    client.open()
    assert client.try_begin(names("a"), 6) is None
    assert house.stock.num_requested == 2
    house.stock.make(1)
    house.memory_ready()
    assert client.answer() is None  # one of two
    house.stock.make(1)
    house.memory_ready()
    assert expect(Begun, client.answer()).num_announced == 1
    assert house.service.next_deadline_s is None


def test_memory_is_given_first_come_first_served(house: House) -> None:
    house.stock.gives = False
    one, two = house.client(), house.client()
    one.open(), two.open()
    assert one.try_begin([], 4) is None
    assert two.reserve(4) is None
    assert house.stock.num_requested == 2
    house.stock.make(1)
    house.memory_ready()
    assert isinstance(one.answer(), Begun)
    assert two.answer() is None
    house.stock.make(1)
    house.memory_ready()
    assert len(reserved_blocks(two, two.answer())) == 4


def test_who_comes_later_does_not_take_the_memory_that_another_waits_for(house: House) -> None:
    house.stock.gives = False
    one, two = house.client(gid=1), house.client(gid=2)
    one.open(), two.open()
    assert one.reserve(1) is None
    house.stock.make(1)  # ready, and the loop has not been told yet
    assert two.reserve(1) is None
    house.memory_ready()
    assert len(reserved_blocks(one, one.answer())) == 1
    assert two.answer() is None
    house.stock.make(1)
    house.memory_ready()
    assert len(reserved_blocks(two, two.answer())) == 1


def test_a_larger_budget_serves_those_who_wait_for_blocks(make_house: Callable[..., House]) -> None:
    house = make_house(1)
    client = house.client()
    client.open()
    client.begin([], 4)
    assert client.try_begin([], 1, wait_s=9.0) is None
    house.service.set_budget(2 * SEGMENT_NBYTES)
    house.deliver()
    assert isinstance(client.answer(), Begun)


def test_without_memory_the_pool_evicts_what_it_has(house: House) -> None:
    client = house.client()
    client.open()
    old = names(*"abcd")
    client.release(client.seal(client.begin(old).reserved, old))
    house.stock.gives = False
    assert client.try_begin(names("x")) is None  # it would rather grow
    house.stock.failed = "the machine is full"
    house.memory_ready()
    assert expect(Begun, client.answer()).num_cached == 0
    assert client.match(old) == 3  # one of them made room
    warnings = house.service.snapshot().warnings
    assert len(warnings) == 1
    assert "the machine is full" in warnings[0]


def test_without_memory_a_pool_evicts_its_own_and_takes_nothing_from_others(house: House) -> None:
    other, client = house.client(gid=1), house.client(gid=2)
    other.open(), client.open()
    kept, old, new = names(*"abcd"), names(*"efgh"), names(*"ijkl")
    for one, hashes in ((other, kept), (client, old)):
        one.release(one.seal(one.begin(hashes).reserved, hashes))
    house.stock.failed = "the machine is full"
    assert len(client.begin(new).reserved) == 4
    assert (client.match(old), other.match(kept)) == (0, 4)


def test_without_any_memory_the_reason_is_told(house: House) -> None:
    house.stock.failed = "the machine is full"
    client = house.client()
    client.open()
    reply = client.reserve(1)
    assert error_code(reply) == "out-of-memory"
    assert "the machine is full" in reply.message  # type: ignore[union-attr]


def test_memory_is_tried_again_after_a_while(house: House) -> None:
    house.stock.failed = "the machine is full"
    client = house.client()
    client.open()
    client.reserve(1)
    house.pass_time(4.9)
    assert house.stock.num_retries == 0
    house.pass_time(0.1)
    assert house.stock.num_retries == 1
    assert len(reserved_blocks(client, client.reserve(5))) == 5
    assert house.service.next_deadline_s is None


def test_waiting_for_memory_has_a_bound(house: House) -> None:
    client = house.client()
    client.open()
    old = names(*"abcd")
    client.release(client.seal(client.begin(old).reserved, old))
    house.stock.gives = False
    assert client.try_begin(names("x")) is None
    house.pass_time(3.0)
    assert isinstance(client.answer(), Begun)
    assert client.match(old) == 3


def test_who_dies_while_waiting_for_memory_leaves_it_to_the_next(house: House) -> None:
    house.stock.gives = False
    one, two = house.client(), house.client()
    one.open(), two.open()
    assert one.reserve(1) is None
    assert two.reserve(1) is None
    one.die()
    house.stock.make(1)
    house.memory_ready()
    assert len(reserved_blocks(two, two.answer())) == 1


def test_a_segment_moves_to_another_tenants_pool_as_other_memory(house: House) -> None:
    one, two = house.client(gid=1), house.client(gid=2)
    one.open(), two.open()
    blocks = one.begin([], 8).reserved
    memory = set(house.stock.taken)
    assert error_code(two.reserve(1)) == "out-of-blocks"
    one.release(reserved=blocks)
    house.stock.gives = False
    assert two.reserve(4) is None
    assert len(one.segments) == 1  # one was revoked
    house.stock.make(1)
    house.memory_ready()
    reserved_blocks(two, two.answer())
    assert len(house.stock.taken & memory) == 1
    assert sum(segment.closed for segment in memory) == 1
    assert list(two.segments.values()) == [True]


def test_a_smaller_budget_revokes_what_is_idle(house: House) -> None:
    client = house.client()
    client.open()
    blocks = client.begin([], 8).reserved
    house.service.set_budget(SEGMENT_NBYTES)
    house.deliver()
    assert len(client.segments) == 2
    assert "above the budget" in house.service.snapshot().warnings[0]
    client.release(reserved=blocks)
    assert len(client.segments) == 1
    assert house.service.snapshot().warnings == []


def test_who_waits_for_blocks_gets_the_segment_another_pool_gave_up(house: House) -> None:
    one, two = house.client(gid=1), house.client(gid=2)
    one.open(), two.open()
    blocks = one.begin([], 8).reserved
    assert two.try_begin([], 2, wait_s=9.0) is None
    one.release(reserved=blocks)
    assert isinstance(two.answer(), Begun)


def test_warnings_of_the_start_stay(make_house: Callable[..., House]) -> None:
    house = make_house(settings=ServiceSettings(warnings=("The budget was cut.",)))
    assert house.service.snapshot().warnings == ["The budget was cut."]


def test_blocks_of_the_test_layout_are_one_page() -> None:
    assert LAYOUT.block_nbytes == 4096


def test_memory_is_not_made_for_who_waits_no_longer(house: House) -> None:
    house.stock.gives = False
    dying, late, patient = house.client(gid=1), house.client(gid=2), house.client(gid=3)
    for client in (dying, late):
        client.open()
        assert client.reserve(4) is None
    assert house.stock.num_requested == 2
    dying.die()
    assert house.stock.num_requested == 1
    patient.open()
    house.pass_time(1.0)
    assert patient.reserve(4) is None
    assert house.stock.num_requested == 2
    house.pass_time(2.5)  # growth_wait_s of the first one is over
    assert error_code(late.answer()) == "out-of-memory"
    assert house.stock.num_requested == 1
