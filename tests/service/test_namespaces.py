"""A salt for each user or conversation makes namespaces without end; the daemon keeps those that mean something."""

from __future__ import annotations

from kvd.hashing import pack_hashes
from kvd.mover import Lookup
from kvd.protocol import requests
from kvd.protocol.replies import Done
from tests.service.harness import House, expect, names
from tests.service.tiers import TieredHouse

FIRST_LOOK = 1024


def open_many(house: House, count: int) -> None:
    """Each client opens 200 namespaces and leaves."""
    for start in range(0, count, 200):
        client = house.client()
        for number in range(start, min(start + 200, count)):
            client.open(salt=f"salt {number}")
        client.die()


def test_namespaces_nobody_needs_are_forgotten_those_in_use_or_with_blocks_stay() -> None:
    house = House()
    writer, keeper = house.client(), house.client()
    writer.open(salt="written")
    writer.seal(writer.begin(names("a"), 1).reserved, names("a"))
    writer.die()
    keeper.open(salt="open")
    open_many(house, 5 * FIRST_LOOK)
    statuses = keeper.status().snapshot.namespaces
    assert len(statuses) <= FIRST_LOOK + 1
    assert {status.num_sealed for status in statuses} == {0, 1}
    assert keeper.begin(names("b"), 1).reply.num_cached == 0  # its own namespace is still there
    reader = house.client()
    reader.open(salt="written")
    assert reader.match(names("a")) == 1
    house.check()
    house.close()


def test_a_namespace_that_is_looked_for_below_stays_until_the_answer() -> None:
    house = TieredHouse()
    client = house.client()
    client.open(salt="asked")
    house.put_below(client, names("a", "b"))
    expect(Done, client.ask(requests.Prefetch, 1, pack_hashes(names("a", "b"))))
    client.die()
    (lookup,) = house.mover.waiting(Lookup)
    open_many(house, 2 * FIRST_LOOK)
    assert house.mover.waiting(Lookup) == [lookup]
    house.run_mover()  # the late answer finds its namespace, or this raises StateError
    again = house.client()
    again.open(salt="asked")
    assert again.match(names("a", "b")) == 2
    house.check()
    house.close()
