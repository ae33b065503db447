"""Cards that were released: who waits until one is back, and what becomes of those who wait in vain."""

from __future__ import annotations

from typing import Any, cast

from kvd.block import SessionId
from kvd.errors import CudaUnavailable, KvdError
from kvd.pool import Pools
from kvd.protocol.requests import OpenCache
from kvd.service import Identity
from kvd.service.homes import Card, CardStock, Home, Homes
from kvd.service.idle import IdleRelease
from kvd.service.sessions import Session
from tests.service.harness import EPOCH, SEGMENT_NBYTES, Client, FakeClock

CARD = "GPU-1"
PATIENCE_S = 20.0


class HandCard:
    """A card that is away, and comes back when the test says so."""

    segment_nbytes = SEGMENT_NBYTES

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.lost: str | None = None
        self.failure: KvdError | None = None
        self.is_changing = False
        self.num_restored = 0

    def restore(self) -> None:
        self.is_changing = True
        self.num_restored += 1


def idle_release(
    home: Home, clock: FakeClock, *, idle_s: float = 0.0, sessions: Any = (), told: list[KvdError] | None = None
) -> IdleRelease:
    return IdleRelease(
        homes=Homes([home]),
        pools=Pools(budget_nbytes=SEGMENT_NBYTES, segment_nbytes=SEGMENT_NBYTES, device=CARD),
        sessions=dict(sessions),
        spilling=None,
        may_be_mapped=lambda _device: False,
        settle=lambda: None,
        again=lambda _session, _request: None,
        fail=lambda _session, _request, error: None if told is None else told.append(error),
        idle_s=idle_s,
        bound_s=1.0,
        patience_s=PATIENCE_S,
        clock=clock,
    )


def test_a_card_that_is_lost_while_idle_has_the_loop_do_nothing() -> None:
    stock, clock = HandCard(is_open=True), FakeClock()
    home = Home(CARD, cast("Any", stock), Card(cast("CardStock", stock), cast("Any", None), ""))
    idle = idle_release(home, clock, idle_s=60.0)
    idle.go_on()
    assert idle.next_deadline_s == clock.now_s + 60.0
    stock.lost = "Xid 79"
    clock.now_s += 61.0
    idle.go_on()
    assert idle.next_deadline_s is None


def test_what_failed_when_all_had_given_up_is_tried_again_for_who_asks_next() -> None:
    stock, clock, told = HandCard(), FakeClock(), cast("list[KvdError]", [])
    home = Home(CARD, cast("Any", stock), Card(cast("CardStock", stock), cast("Any", None), ""))
    session = Session(SessionId(1), Identity(pid=1, uid=0, gid=0), "", "", "", connected_s=0.0)
    idle = idle_release(home, clock, sessions={session.id: session}, told=told)
    request = OpenCache(1, EPOCH, **cast("Any", Client.opening()))
    assert idle.waits(home, session, request)
    clock.now_s += PATIENCE_S
    idle.go_on()
    assert [str(error) for error in told] == [f"{CARD} did not come back within 20 s"]
    stock.is_changing, stock.failure = False, CudaUnavailable("something else had the card")
    idle.go_on()
    assert idle.waits(home, session, request)
    assert (stock.num_restored, len(told)) == (2, 1)
