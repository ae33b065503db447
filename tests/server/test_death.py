"""How a session ends: at once, by the kernel's word, and never while its process lives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvd.protocol.requests import Release, Reserve
from tests.support.processes import client_process
from tests.support.raw_client import RawClient, hashes, totals
from tests.support.stopwatch import within
from tests.support.wait import eventually

NUM_BLOCKS = 1000
NAMES = [f"block {index}" for index in range(NUM_BLOCKS)]


def test_a_killed_reader_gives_all_its_references_back_within_a_second(daemon):  # case B1
    with RawClient(daemon.folder) as observer, client_process(daemon.folder, seal=NUM_BLOCKS) as writer:
        with client_process(daemon.folder, attach=NUM_BLOCKS) as reader:
            assert totals(observer.status()) == (2 * NUM_BLOCKS, 0)
            reader.kill()
            within(1.0, lambda: totals(observer.status()) == (NUM_BLOCKS, 0), daemon.pid)
        writer.kill()
        within(1.0, lambda: totals(observer.status()) == (0, 0), daemon.pid)
        observer.check()


def test_a_writer_killed_before_its_seal_leaves_nothing(daemon):  # case B2
    with RawClient(daemon.folder) as observer:
        cache = observer.open_cache()
        with client_process(daemon.folder, reserve=100) as writer:
            assert totals(observer.status()) == (0, 100)
            writer.kill()
            within(1.0, lambda: totals(observer.status()) == (0, 0), daemon.pid)
        [pool] = observer.status().pools
        assert pool.num_free == pool.num_segments * 256
        assert observer.begin(cache, hashes("block 0"), num_blocks=1).num_cached == 0
        observer.check()


def test_a_stopped_reader_keeps_what_it_holds(daemon):  # case B6
    with RawClient(daemon.folder) as observer, client_process(daemon.folder, seal=10) as reader:
        os.kill(reader.pid, signal.SIGSTOP)
        try:
            cache = observer.open_cache()
            # More blocks than there is memory go through the pool; the stopped process's are never among the evicted.
            for index in range(20):
                begun = observer.begin(cache, num_blocks=1000)
                observer.seal(cache, begun.blocks, hashes(*(f"{index} {block}" for block in range(1000))))
                observer.ask(Release, cache, blocks=begun.blocks, ack=True)
            status = observer.status()
            assert status.pools[0].counters["evictions"] > 0
            assert totals(status) == (10, 0)
            assert not any(client.stalled for client in status.clients)
        finally:
            os.kill(reader.pid, signal.SIGCONT)
        names = hashes(*(f"block {index}" for index in range(10)))
        assert observer.begin(cache, names, num_blocks=10).num_cached == 10


def test_a_forked_child_does_not_keep_its_parents_session(daemon):  # case B9
    with RawClient(daemon.folder) as observer, client_process(daemon.folder, seal=5) as client:
        said = client.tell({"fork": True})
        assert totals(observer.status()) == (5, 0)
        os.kill(said["done"], signal.SIGKILL)
        within(1.0, lambda: totals(observer.status()) == (0, 0), daemon.pid)
        assert Path(f"/proc/{said['child']}").exists()  # it still holds the session socket open
        assert observer.counter("num_exits_seen_by_pidfd") == 1


def test_requests_queued_by_the_dead_change_nothing(daemon):  # case B16
    with RawClient(daemon.folder) as observer:
        num_before = len(observer.status().clients)
        with client_process(daemon.folder, reserve=1) as sender:
            assert len(observer.status().clients) == num_before + 1
            # The daemon sleeps while 500 requests pile up and their sender dies; it wakes up to both at once.
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                sender.tell({"post": 500})
                sender.kill()
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
        within(1.0, lambda: len(observer.status().clients) == num_before, daemon.pid)
        eventually(lambda: observer.counter("num_late_messages") > 0)
        assert totals(observer.status()) == (0, 0)
        observer.check()


def test_closing_the_session_socket_is_the_end_whatever_the_dealer_still_sends(daemon):
    with RawClient(daemon.folder) as observer, RawClient(daemon.folder) as client:
        cache = client.open_cache()
        client.reserve(cache, 3)
        client.session_socket.close()
        within(1.0, lambda: totals(observer.status()) == (0, 0), daemon.pid)
        num_late = observer.counter("num_late_messages")
        client.post(Reserve, cache, 1)
        eventually(lambda: observer.counter("num_late_messages") == num_late + 1)
        assert totals(observer.status()) == (0, 0)
