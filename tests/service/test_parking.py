from __future__ import annotations

from kvd.block import ChainHash, SessionId
from kvd.service import Identity
from kvd.service.parking import Parked, ParkingLot
from kvd.service.sessions import Session

HERE, THERE = (0, ChainHash(b"here")), (0, ChainHash(b"there"))


def session() -> Session:
    return Session(SessionId(1), Identity(1, 1, 1), "tenant", "", "", 0.0)


def test_places_are_left_in_the_order_they_were_taken() -> None:
    lot: ParkingLot[Parked] = ParkingLot()
    one, two, three = (Parked(session()) for _ in range(3))
    for request in (one, two, three):
        lot.park(request, HERE, 5.0)
    lot.park(one, HERE, 6.0)  # keeps its turn
    assert lot.at(HERE) == [one, two, three]
    lot.park(one, THERE, 6.0)
    lot.park(one, HERE, 6.0)  # came back, and queues anew
    assert lot.at(HERE) == [two, three, one]
    assert lot.at(THERE) == []
    assert len(lot) == 3


def test_stays_end_earliest_first_and_once() -> None:
    lot: ParkingLot[Parked] = ParkingLot()
    late, early = Parked(session()), Parked(session())
    lot.park(late, HERE, 9.0)
    lot.park(early, ("memory", "host"), 3.0)
    assert lot.next_deadline_s == 3.0
    assert lot.expired(2.9) == []
    assert lot.expired(9.0) == [early, late]
    assert lot.expired(9.0) == []


def test_a_stay_that_is_renewed_to_the_same_end_still_ends() -> None:
    lot: ParkingLot[Parked] = ParkingLot()
    request = Parked(session())
    lot.park(request, HERE, 3.0)
    assert lot.expired(3.0) == [request]
    lot.park(request, HERE, 3.0)
    assert lot.next_deadline_s == 3.0
    assert lot.expired(3.0) == [request]


def test_who_left_has_no_deadline_and_no_place() -> None:
    lot: ParkingLot[Parked] = ParkingLot()
    owner = session()
    requests = [Parked(owner) for _ in range(3)]
    for request in requests:
        lot.park(request, HERE, 3.0)
    lot.leave(requests[0])
    lot.leave(requests[0])
    assert owner.parked == set(requests[1:])
    lot.forget(owner)
    assert (len(lot), owner.parked, lot.next_deadline_s, lot.at(HERE)) == (0, set(), None, [])


def test_short_stays_leave_no_pile_of_deadlines() -> None:
    lot: ParkingLot[Parked] = ParkingLot()
    owner = session()
    for number in range(10_000):
        request = Parked(owner)
        lot.park(request, HERE, 300.0 + number)
        lot.leave(request)
    assert len(lot._deadlines) < 100
