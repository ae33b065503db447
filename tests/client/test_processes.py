"""Several client processes and one daemon: single flight, death, slowness, restart, foreign blocks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvd_client
from kvd.block import BlockId
from kvd.errors import DaemonRestarted, DaemonUnavailable, NotOwned, WouldWait, from_wire
from kvd.hashing import chain_hashes, encode_tokens, pack_hashes
from kvd.protocol.replies import Failed, Reply
from kvd.protocol.requests import Release, Request, Retain, Seal
from kvd.protocol.wire import pack_block_ids
from kvd_client.transport.blocking import Runner
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.client.patience import gives_up_after
from tests.client.processes import Worker
from tests.support.daemon import Daemon
from tests.support.stopwatch import Stopwatch
from tests.support.wait import eventually

PROMPT = list(range(1000, 1100))


def test_another_process_maps_what_the_first_computed(
    client: kvd_client.Client, start_worker: Callable[[], Worker]
) -> None:
    writer, reader = start_worker(), start_worker()
    assert writer.call("publish", tokens=PROMPT) == 96
    assert reader.call("begin", tokens=PROMPT) == 96
    assert reader.call("holds") is True
    writer.kill()
    assert reader.call("holds") is True
    reader.kill()
    eventually(lambda: sum(pool.num_references for pool in client.status().pools) == 0)
    client.check()


# case B8
def test_two_processes_that_want_the_same_compute_it_once(start_worker: Callable[[], Worker]) -> None:
    first, second = start_worker(), start_worker()
    first.send("get_or_compute", tokens=PROMPT)
    assert first.read() == {"computing": 0}
    second.send("get_or_compute", tokens=PROMPT, wait_s=30)
    first.send("go")
    assert first.read() == {"cached": 0, "right": True}
    # The second was waiting, or came just then: it finds all but the last token's block.
    assert second.read() == {"computing": 96}
    second.send("go")
    assert second.read() == {"cached": 96, "right": True}


# case B8
def test_when_the_first_is_killed_half_way_the_second_goes_on_within_a_second(
    daemon: Daemon, client: kvd_client.Client, start_worker: Callable[[], Worker]
) -> None:
    first, second = start_worker(), start_worker()
    first.send("get_or_compute", tokens=PROMPT)
    assert first.read() == {"computing": 0}
    second.send("get_or_compute", tokens=PROMPT, wait_s=60)
    eventually(lambda: any(entry.num_waiting for entry in client.status().clients))
    watch = Stopwatch(daemon.pid, second.process.pid)
    first.kill()
    assert second.read() == {"computing": 0}
    assert watch.elapsed_s() < 1
    second.send("go")
    assert second.read() == {"cached": 0, "right": True}


def test_a_computation_that_raises_lets_the_next_go_on_at_once(
    client: kvd_client.Client, start_worker: Callable[[], Worker]
) -> None:
    second = start_worker()

    def fail(_seq: kvd_client.Sequence) -> None:
        second.send("get_or_compute", tokens=PROMPT, wait_s=60)
        with kvd_client.connect(runtime_dir) as observer:
            eventually(lambda: any(entry.num_waiting for entry in observer.status().clients))
        raise ArithmeticError

    runtime_dir = client.status().runtime_dir
    with pytest.raises(ArithmeticError):
        client.cache(model=MODEL, layout=LAYOUT).get_or_compute(PROMPT, fail)
    assert second.read(timeout_s=5) == {"computing": 0}


# case B13
def test_sessions_that_wait_for_each_other_are_not_left_waiting(start_worker: Callable[[], Worker]) -> None:
    left, right = start_worker(), start_worker()
    other = [*range(5000, 5100)]
    assert left.call("begin", tokens=PROMPT) == 0
    assert right.call("begin", tokens=other) == 0
    # Both have announced; by default neither may wait for the other.
    assert left.call("begin", tokens=other)[0] == WouldWait.__name__
    # On their own word they may wait, and for so long only.
    left.send("begin", tokens=other, wait_s=1)
    right.send("begin", tokens=PROMPT, wait_s=1)
    assert left.read(timeout_s=10) == 0
    assert right.read(timeout_s=10) == 0
    assert left.call("fill_and_commit") == 96
    assert right.call("fill_and_commit") == 96


# case B6
def test_a_stopped_reader_keeps_its_bytes(client: kvd_client.Client, start_worker: Callable[[], Worker]) -> None:
    reader = start_worker()
    assert reader.call("publish", tokens=PROMPT) == 96
    reader.call("keep_tensor")
    reader.stop()
    cache = client.cache(model=MODEL, layout=LAYOUT, salt="flood")
    for index in range(40):
        tokens = [index] * 1600
        with cache.sequence(tokens, max_tokens=1600, wait_s=0) as seq:
            seq.array(0, 1600).fill_(index)
            seq.advance(1600)
            seq.commit()
    assert sum(pool.counters["evictions"] for pool in client.status().pools) > 0
    assert max(entry.num_references for entry in client.status().clients) == 6
    reader.go_on()
    assert reader.call("holds") is True


def ask(client: kvd_client.Client, make: Callable[[int, int, int], Request]) -> Reply:
    """A request that the library itself would never make, over its own channel."""
    runner = client._runner
    (cache,) = runner.link.caches.values()
    request = make(runner.link.next_id(), runner.link.epoch, cache.handle)
    reply = runner._current[1].exchange(request, 10)
    if isinstance(reply, Failed):
        raise from_wire(reply.code, reply.message)
    return reply


# case B3
def test_what_a_session_does_not_hold_it_cannot_use(daemon: Daemon, client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    seq = cache.sequence(PROMPT)
    fill(seq, PROMPT)
    seq.commit()
    core = seq._core
    sealed, reserved = core._blocks[0], core._blocks[-1]
    digest = client._runner.link.caches[cache._spec].digest
    (some_hash,) = chain_hashes(digest, encode_tokens(range(16)), 16)

    def pack(*blocks: int) -> bytes:
        return pack_block_ids([BlockId(block) for block in blocks])

    with kvd_client.connect(daemon.folder) as other:
        other.cache(model=MODEL, layout=LAYOUT)
        before = client.status().pools
        for make in (
            lambda i, e, c: Release(i, e, c, blocks=pack(sealed), ack=True),
            lambda i, e, c: Release(i, e, c, reserved=pack(reserved), ack=True),
            lambda i, e, c: Release(i, e, c, blocks=pack(12345), ack=True),
            lambda i, e, c: Seal(i, e, c, pack(reserved), pack_hashes([some_hash])),
            lambda i, e, c: Retain(i, e, c, pack(sealed)),
        ):
            with pytest.raises(NotOwned):
                ask(other, make)
        assert client.status().pools == before
    seq.close()
    before = client.status().pools
    for make in (
        lambda i, e, c: Release(i, e, c, blocks=pack(sealed), ack=True),
        lambda i, e, c: Release(i, e, c, reserved=pack(reserved), ack=True),
        lambda i, e, c: Retain(i, e, c, pack(sealed)),
        lambda i, e, c: Seal(i, e, c, pack(reserved), pack_hashes([some_hash])),
    ):
        with pytest.raises(NotOwned):
            ask(client, make)
    assert client.status().pools == before
    client.check()


# case B12
def test_after_a_restart_a_client_that_holds_nothing_connects_again(daemon: Daemon, client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    epoch = client.epoch
    for _ in range(2):
        with cache.sequence(PROMPT) as seq:
            assert seq.num_cached_tokens == 0
            fill(seq, PROMPT)
            seq.commit()
        assert cache.match(PROMPT) == 96
        daemon.kill()
        daemon.start()
    assert cache.match(PROMPT) == 0
    assert client.epoch != epoch
    daemon.kill()
    with pytest.raises(DaemonUnavailable):
        client.status()
    daemon.start()
    assert client.status().pools == []


# case B12
def test_a_daemon_that_dies_before_it_greets_is_unavailable(daemon: Daemon, client: kvd_client.Client) -> None:
    daemon.kill()
    daemon.start()
    os.kill(daemon.pid, signal.SIGSTOP)
    said: list[BaseException] = []

    def ask() -> None:
        try:
            client.status()
        except kvd_client.KvdError as error:
            said.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(client._runner._reconnecting.locked)
    eventually(lambda: num_unread(daemon.folder / "session.sock") > 0)
    daemon.kill()
    asking.join()
    assert [type(error) for error in said] == [DaemonUnavailable]
    daemon.start()
    assert len(client.status().clients) == 1


def num_unread(path: Path) -> int:
    """Connections that nobody has accepted, by the kernel's list: still connecting, with that path at the other end."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.split()[5] == "02" and line.endswith(str(path)) for line in lines[1:])


# case B12
def test_a_daemon_that_dies_right_after_it_greeted_is_unavailable(
    daemon: Daemon, client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Runner._connect

    def connect_to_the_dying(runner: Runner) -> object:
        connected = connect(runner)
        daemon.kill()
        return connected

    daemon.kill()
    daemon.start()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_connect", connect_to_the_dying)
        with pytest.raises(DaemonUnavailable, match="ended as this client connected"):
            client.status()
    with pytest.raises(DaemonUnavailable, match="start one with"):
        client.status()
    daemon.start()
    assert len(client.status().clients) == 1


# case B12
def test_token_ids_that_are_read_once_survive_a_restart(daemon: Daemon, client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    daemon.kill()
    daemon.start()
    with cache.sequence(iter(PROMPT)) as seq:
        assert seq.token_ids == PROMPT


# case B12
@pytest.mark.parametrize("end", [Daemon.kill, Daemon.stop])
def test_after_a_restart_whoever_holds_something_is_told(
    daemon: Daemon, client: kvd_client.Client, end: Callable[[Daemon], object]
) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    seq = cache.sequence(PROMPT)
    fill(seq, PROMPT)
    seq.commit()
    end(daemon)
    assert holds(seq, PROMPT, 100)
    daemon.start()
    for call in (client.status, lambda: cache.sequence(PROMPT), seq.commit, seq.fork, lambda: seq.extend(1000)):
        with pytest.raises(DaemonRestarted):
            call()
    assert holds(seq, PROMPT, 100)
    seq.close()
    with cache.sequence(PROMPT) as again:
        assert again.num_cached_tokens == 0
        fill(again, PROMPT)
        assert again.commit() == 96
    client.check()


def test_an_interrupted_begin_gives_back_what_still_comes(
    daemon: Daemon, client: kvd_client.Client, start_worker: Callable[[], Worker]
) -> None:
    writer = start_worker()
    writer.call("begin", tokens=PROMPT)
    cache = client.cache(model=MODEL, layout=LAYOUT)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def send_it_once_the_begin_waits() -> None:
        with kvd_client.connect(daemon.folder) as observer:
            eventually(lambda: any(entry.num_waiting for entry in observer.status().clients))
        os.kill(os.getpid(), signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, interrupt)
    sending = threading.Thread(target=send_it_once_the_begin_waits)
    sending.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.sequence(PROMPT, wait_s=60)
        sending.join()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert writer.call("fill_and_commit") == 96

    def own_figures() -> tuple[int, int, int]:
        (own,) = [entry for entry in client.status().clients if entry.session == client.session_id]
        return own.num_references, own.num_reserved, own.num_announced

    eventually(lambda: own_figures() == (0, 0, 0))
    with cache.sequence(PROMPT) as seq:
        assert seq.num_cached_tokens == 96


def test_a_daemon_that_does_not_answer_is_a_time_out_for_every_thread(daemon: Daemon) -> None:
    said: list[str] = []
    with kvd_client.connect(daemon.folder) as client:

        def ask_status() -> None:
            try:
                client.status()
            except kvd_client.KvdError as error:
                said.append(type(error).__name__)

        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            threads = [threading.Thread(target=ask_status) for _ in range(4)]
            with gives_up_after(0.5, client):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(10)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert said == ["RequestTimeout"] * 4
        # It held nothing, so it connects again.
        assert len(client.status().clients) == 1


def test_no_daemon_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="start one with `kvd serve`"):
        kvd_client.connect(tmp_path)
