"""How long a begin waits for what is below: a tier that hangs costs little, a machine that is busy costs no hit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.errors import TierUnavailable
from kvd.mover import Fill, Learn, Lookup
from kvd.protocol import requests
from kvd.protocol.replies import Begun, CacheOpened
from tests.service.harness import expect, names
from tests.service.tiers import TieredClient, TieredHouse

PROMPT = names(*"abcd")
SHORT_S = 0.08
"""`answer_s`: for a tier that has the question."""
PATIENT_S = 1.0
"""`first_answer_s`: all in all, while it does not have it."""


@pytest.fixture
def house() -> Iterator[TieredHouse]:
    house = TieredHouse(4)
    yield house
    house.check()
    house.close()


def asking(house: TieredHouse) -> TieredClient:
    """A client whose prompt lies below, and begins; the tiers have answered before."""
    client = house.client()
    client.open()
    house.put_below(client, PROMPT)
    assert client.try_begin(PROMPT) is None
    return client


def cached(client: TieredClient) -> int | None:
    reply = client.answer()
    return None if reply is None else expect(Begun, reply).num_cached


def test_a_question_that_no_thread_has_taken_yet_costs_no_hit(house: TieredHouse) -> None:
    client = asking(house)
    house.pass_time(5 * SHORT_S)
    assert cached(client) is None
    house.run_mover()
    assert cached(client) == 4


def test_but_not_for_ever(house: TieredHouse) -> None:
    client = asking(house)
    house.pass_time(PATIENT_S - 0.01)
    assert cached(client) is None
    house.pass_time(0.02)
    assert cached(client) == 0


def test_a_tier_that_hangs_over_the_question_is_given_up_soon(house: TieredHouse) -> None:  # case C1
    client = asking(house)
    (lookup,) = house.mover.waiting(Lookup)
    house.pass_time(3 * SHORT_S)
    house.mover.begin(lookup)
    house.pass_time(SHORT_S - 0.01)
    assert cached(client) is None
    house.pass_time(0.02)
    assert cached(client) == 0
    house.mover.end(lookup)
    house.mover_done()


def test_who_stands_behind_a_question_that_hangs_waits_no_longer_than_that(house: TieredHouse) -> None:  # case C1
    first = asking(house)
    (lookup,) = house.mover.waiting(Lookup)
    house.mover.begin(lookup)
    house.pass_time(SHORT_S / 2)
    second = house.client()
    second.open()
    assert second.try_begin([*PROMPT, *names("x")]) is None
    house.pass_time(SHORT_S)
    assert (cached(first), cached(second)) == (0, 0)
    house.mover.end(lookup)
    house.mover_done()


def test_a_copy_that_no_thread_has_taken_yet_costs_no_hit(house: TieredHouse) -> None:
    client = asking(house)
    house.run_mover(Lookup)
    house.pass_time(5 * SHORT_S)
    assert cached(client) is None
    house.run_mover()
    assert cached(client) == 4


def test_a_copy_that_hangs_is_given_up_soon(house: TieredHouse) -> None:  # case C1
    client = asking(house)
    house.run_mover(Lookup)
    first, *others = house.mover.waiting(Fill)
    house.mover.begin(first)
    house.pass_time(SHORT_S + 0.01)
    assert cached(client) == 0
    assert all(job.cancelled for job in others)
    house.mover.end(first)
    house.mover_done()


def test_the_patience_is_one_for_the_whole_begin(house: TieredHouse) -> None:
    client = asking(house)
    house.pass_time(0.6)
    house.run_mover(Lookup)
    house.pass_time(PATIENT_S - 0.6 - 0.01)
    assert cached(client) is None
    house.pass_time(0.02)
    assert cached(client) == 0


def test_a_caller_with_a_bound_of_his_own_has_exactly_that(house: TieredHouse) -> None:
    client = house.client()
    client.open()
    house.put_below(client, PROMPT)
    assert client.try_begin(PROMPT, wait_s=0.3) is None
    house.pass_time(0.29)
    assert cached(client) is None
    house.pass_time(0.02)
    assert cached(client) == 0


def test_the_first_answer_may_take_longer_though_the_tier_has_the_question(house: TieredHouse) -> None:
    """Connecting, and the start of a server, come before it."""
    client = house.client()
    assert client.ask(requests.OpenCache, **client.opening()) is None
    (learn,) = house.mover.waiting(Learn)
    house.mover.begin(learn)
    house.pass_time(5 * SHORT_S)
    assert client.answer() is None
    house.mover.end(learn)
    house.mover_done()
    expect(CacheOpened, client.answer())
    # From now on it hangs for a short time only.
    house.pass_time(6.0)
    house.run_mover()
    other = house.client()
    assert other.ask(requests.OpenCache, **(other.opening() | {"model": "other"})) is None
    (learn,) = house.mover.waiting(Learn)
    house.mover.begin(learn)
    house.pass_time(SHORT_S + 0.01)
    expect(CacheOpened, other.answer())
    house.mover.end(learn)
    house.mover_done()


def test_one_that_fails_at_once_holds_nobody_up(house: TieredHouse) -> None:
    house.tier.fail_always("generation", TierUnavailable("gone"))
    client = house.client()
    assert client.ask(requests.OpenCache, **client.opening()) is None
    house.run_mover(Learn)
    expect(CacheOpened, client.answer())
