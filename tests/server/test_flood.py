"""One client that sends too much, or reads too little: the others stay served."""

from __future__ import annotations

import select
import statistics
import threading
import time

import pytest

from kvd.protocol.replies import Begun, Done, Failed, Matched, Reserved
from kvd.protocol.requests import Begin, Match, Release, Reserve, Status
from kvd.protocol.session import Goodbye, Refused, SegmentGranted, Welcome
from tests.support.daemon import running_daemon
from tests.support.open_place import open_doors, open_place
from tests.support.raw_client import RawClient, hashes, totals
from tests.support.unprivileged import as_nobody
from tests.support.wait import eventually

NUM_REQUESTS = 100_000


@pytest.mark.parametrize("num_in_flight", [64, NUM_REQUESTS], ids=["within its credits", "without any bound"])
def test_a_flood_of_requests_leaves_the_others_served(daemon, num_in_flight):  # case B10
    with RawClient(daemon.folder) as observer, RawClient(daemon.folder) as flooder:
        cache, own = flooder.open_cache(), observer.open_cache()
        packed = hashes(*(f"{index}" for index in range(32)))
        before_nbytes = daemon.anonymous_nbytes()
        num_answered = 0

        def flood():
            nonlocal num_answered
            num_posted = 0
            # Whoever ignores its credits may be sent away; whoever keeps to them must be answered every time.
            while num_answered < NUM_REQUESTS and not select.select([flooder.session_socket], [], [], 0)[0]:
                while num_posted < NUM_REQUESTS and num_posted - num_answered < num_in_flight:
                    flooder.post(Match, cache, packed)
                    num_posted += 1
                while flooder.dealer.poll(100 if num_posted - num_answered >= num_in_flight else 0):
                    flooder.receive()
                    num_answered += 1

        flooding = threading.Thread(target=flood)
        flooding.start()
        waits_s = []
        while flooding.is_alive():
            start_s = time.monotonic()
            observer.ask(Match, own, packed[:32])
            waits_s.append(time.monotonic() - start_s)
        flooding.join()
        assert statistics.median(waits_s) < 0.05
        assert max(waits_s) < 1.0
        assert daemon.anonymous_nbytes() < before_nbytes + (64 << 20)
        assert num_answered == NUM_REQUESTS or num_in_flight > 64
        observer.check()


def test_a_session_that_reads_no_replies_is_ended_and_nobody_else(daemon):  # case B10
    with RawClient(daemon.folder) as observer, RawClient(daemon.folder, connect=False) as flooder:
        # With a high-water mark of one message, what the test does not read stays in the daemon.
        flooder.dealer = flooder.connect_dealer(flooder.answer.token, rcvhwm=1)
        for _ in range(20_000):
            flooder.post(Status)
        goodbye = flooder.next_datagram()
        assert isinstance(goodbye, Goodbye)
        assert goodbye.code == "overloaded"
        status = observer.status()
        assert [client.session for client in status.clients] == [observer.answer.session]
        assert status.counters["num_stalls"] >= 1
        assert status.counters["num_sessions_expelled"] == 1


def test_more_requests_in_flight_than_granted_are_refused(tmp_path):  # case B10
    with (
        running_daemon(tmp_path, limits={"credits": 4}) as daemon,
        RawClient(daemon.folder) as writer,
        RawClient(daemon.folder) as waiter,
    ):
        packed = hashes("wanted")
        writer.begin(writer.open_cache(), packed, num_blocks=1)  # announced, never sealed
        cache = waiter.open_cache()
        waiting = [waiter.post(Begin, cache, packed, 1, 1, True, 60.0) for _ in range(4)]
        over = waiter.post(Begin, cache, packed, 1, 1, True, 60.0)
        failed = waiter.receive()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code) == (over, "overloaded")
        # A release without an answer is never refused: that would be a leak.
        waiter.post(Release, cache)
        writer.close()
        answered = {waiter.receive().request_id for _ in waiting}
        assert answered == set(waiting)
        assert waiter.counter("num_overloaded") == 1


def test_one_session_cannot_reserve_more_than_its_share(tmp_path):  # case B10
    with (
        running_daemon(tmp_path, limits={"session_nbytes": 8 << 20}) as daemon,
        RawClient(daemon.folder) as greedy,
        RawClient(daemon.folder) as other,
    ):
        cache = greedy.open_cache()
        answers = [greedy.ask(Reserve, cache, 256) for _ in range(40)]
        assert {answer.code for answer in answers if isinstance(answer, Failed)} == {"quota-exceeded"}
        assert totals(greedy.status()) == (0, 8 * 256)
        assert len(other.reserve(other.open_cache(), 1000)) == 4000


def test_one_user_cannot_take_every_session():  # case B10
    with (
        open_place() as place,
        running_daemon(place, limits={"sessions": 8, "uid_sessions": 2}) as daemon,
        RawClient(daemon.folder) as one,
        RawClient(daemon.folder),
    ):
        with RawClient(daemon.folder) as third:
            assert isinstance(third.answer, Refused)
            assert (third.answer.code, "limits.uid_sessions" in third.answer.message) == ("overloaded", True)
        assert another_user_is_welcome(daemon)
        assert one.counter("num_sessions_refused") == 1


def another_user_is_welcome(daemon) -> bool:
    """Whether another user still gets a session."""
    open_doors(daemon)

    def asks() -> bool:
        with RawClient(daemon.folder, connect=False) as client:
            return isinstance(client.answer, Welcome)

    return as_nobody(asks)


def test_one_user_cannot_have_more_requests_in_flight_than_its_share(tmp_path):  # case B10
    """Two sessions of one user, each within its credits; what both wait for together is over the user's share."""
    with (
        running_daemon(tmp_path, limits={"uid_requests": 3}) as daemon,
        RawClient(daemon.folder) as writer,
        RawClient(daemon.folder) as first,
        RawClient(daemon.folder) as second,
    ):
        packed = hashes("wanted")
        writer.begin(writer.open_cache(), packed, num_blocks=1)  # announced, never sealed
        caches = [client.open_cache() for client in (first, second)]
        for client, cache in zip((first, second), caches, strict=True):
            client.post(Begin, cache, packed, 1, 1, True, 60.0)
        eventually(lambda: sum(one.num_waiting for one in writer.status().clients) == 2)
        first.post(Begin, caches[0], packed, 1, 1, True, 60.0)

        def refusal() -> Failed | None:
            # Between two connections there is no order: the third may still be on its way.
            reply = second.ask(Match, caches[1], packed)
            return reply if isinstance(reply, Failed) else None

        failed = eventually(refusal)
        assert (failed.code, "limits.uid_requests" in failed.message) == ("overloaded", True)
        # Those that wait end with their session, and count no more.
        first.close()
        eventually(lambda: isinstance(second.ask(Match, caches[1], packed), Matched))
        writer.close()
        assert isinstance(second.receive(), Begun)


def test_replies_wait_behind_the_grants_they_need(tmp_path):
    """A session socket that nobody reads fills up; the replies that name its segments wait, and then all come."""
    num_segments = 600
    with (
        running_daemon(tmp_path, budget="64MiB", segment="64KiB", limits={"credits": 1024}) as daemon,
        RawClient(daemon.folder) as raw,
        RawClient(daemon.folder) as observer,
    ):
        cache = raw.open_cache()
        for _ in range(num_segments):
            raw.post(Reserve, cache, 16)  # a whole segment
        num_early = 0
        while raw.dealer.poll(500):
            raw.receive()
            num_early += 1
        assert num_early < num_segments
        # Every request has been carried out, so no more grants are to come.
        eventually(lambda: totals(observer.status())[1] == num_segments * 16, 60)
        num_descriptors = daemon.num_descriptors()
        assert num_early <= sum(isinstance(message, SegmentGranted) for message in raw.drain())
        for _ in range(num_segments - num_early):
            raw.drain()
            assert isinstance(raw.receive(), Reserved)
        granted = {(grant.pool, grant.segment) for grant in raw.drain() if isinstance(grant, SegmentGranted)}
        assert len(granted) == num_segments
        assert raw.counter("num_stalls") == 0
        # The duplicates that waited with their grants are closed.
        eventually(lambda: daemon.num_descriptors() < num_descriptors)


def test_a_session_socket_that_is_never_read_ends_the_session(tmp_path):
    with (
        running_daemon(tmp_path, budget="96MiB", segment="64KiB", limits={"credits": 4096}) as daemon,
        RawClient(daemon.folder) as raw,
        RawClient(daemon.folder) as observer,
    ):
        cache = raw.open_cache()
        for _ in range(1500):
            raw.post(Reserve, cache, 16)
        eventually(lambda: len(observer.status().clients) == 1)
        assert observer.counter("num_sessions_expelled") == 1
        assert totals(observer.status()) == (0, 0)
        observer.check()


def test_a_stalled_session_is_served_again_when_it_reads(daemon):
    with RawClient(daemon.folder) as raw:
        cache = raw.open_cache()
        for _ in range(60):  # fewer than its credits
            raw.post(Release, cache, ack=True)
        assert all(isinstance(raw.receive(), Done) for _ in range(60))
        eventually(lambda: not raw.status().clients[0].stalled)
