from __future__ import annotations

import pytest

from kvd.errors import BlockMissing, TierFull, TierRefused, TierUnavailable
from kvd.tiers.breaker import BreakerState, CircuitBreaker
from tests.support.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker(threshold=3, first_backoff_s=1.0, max_backoff_s=4.0, clock=clock)


def fail(breaker: CircuitBreaker, error: Exception | None = None) -> None:
    error = error or TierUnavailable("gone", cause="timeout")
    with pytest.raises(type(error)), breaker.guard():
        raise error


def refused(breaker: CircuitBreaker) -> str:
    """The cause with which a call is refused without being made; empty when it may be made."""
    try:
        with breaker.guard():
            return ""
    except TierUnavailable as error:
        return error.cause


def test_it_opens_after_failures_in_a_row(breaker: CircuitBreaker):
    fail(breaker)
    fail(breaker)
    assert refused(breaker) == ""
    for _ in range(3):
        fail(breaker)
    assert refused(breaker) == "timeout-waiting"
    assert breaker.view().state is BreakerState.OPEN
    assert (breaker.view().reason, breaker.view().retry_in_s) == ("gone", 1.0)
    assert not breaker.may_enter()


def test_a_call_may_be_made_when_the_probe_is_due(breaker: CircuitBreaker, clock: FakeClock):
    assert breaker.may_enter()
    fail(breaker, TierRefused("wrong password", cause="auth"))
    assert not breaker.may_enter()
    clock.advance(1.0)
    assert breaker.may_enter()


def test_a_refusal_opens_it_at_once(breaker: CircuitBreaker):
    fail(breaker, TierRefused("wrong password", cause="auth"))
    assert refused(breaker) == "auth-waiting"


def test_an_answer_that_is_no_good_news_still_is_an_answer(breaker: CircuitBreaker):
    fail(breaker)
    fail(breaker)
    fail(breaker, BlockMissing("not there"))
    fail(breaker)
    fail(breaker)
    assert breaker.view().state is BreakerState.CLOSED


def test_one_probe_at_a_time_and_its_success_closes(breaker: CircuitBreaker, clock: FakeClock):
    for _ in range(3):
        fail(breaker)
    clock.advance(0.9)
    assert refused(breaker) == "timeout-waiting"
    clock.advance(0.1)
    with breaker.guard():
        assert breaker.view().state is BreakerState.HALF_OPEN
        assert refused(breaker) == "timeout-waiting"
    assert refused(breaker) == ""
    assert breaker.view() == breaker.view().__class__(BreakerState.CLOSED, "", 0.0)


def test_each_failed_probe_doubles_the_wait_up_to_the_limit(breaker: CircuitBreaker, clock: FakeClock):
    for _ in range(3):
        fail(breaker)
    waits = []
    for _ in range(4):
        waits.append(breaker.view().retry_in_s)
        clock.advance(waits[-1])
        fail(breaker)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    clock.advance(4.0)
    assert refused(breaker) == ""
    for _ in range(3):
        fail(breaker)
    assert breaker.view().retry_in_s == 1.0


def test_a_probe_that_ends_in_another_exception_does_not_block_the_next(breaker: CircuitBreaker, clock: FakeClock):
    for _ in range(3):
        fail(breaker)
    clock.advance(1.0)
    fail(breaker, KeyError("a defect"))
    assert breaker.view().state is BreakerState.OPEN
    clock.advance(1.0)
    assert refused(breaker) == ""


def test_a_late_failure_does_not_prolong_the_wait(breaker: CircuitBreaker, clock: FakeClock):
    for _ in range(3):
        fail(breaker)
    clock.advance(0.5)
    breaker.failed(TierUnavailable("slow thread", cause="timeout"))
    assert breaker.view().retry_in_s == 0.5


def test_it_can_guard_room_instead_of_reach(clock: FakeClock):
    room = CircuitBreaker(trips=TierFull, refusal=TierFull, first_backoff_s=1.0, clock=clock)
    fail(room)
    assert refused(room) == ""
    fail(room, TierFull("no room", cause="full"))
    with pytest.raises(TierFull) as caught, room.guard():
        pass
    assert caught.value.cause == "full-waiting"
