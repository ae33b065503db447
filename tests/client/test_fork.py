"""fork(2) and threads: one client, many callers."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import kvd_client
import kvd_client.session.fork
from kvd.errors import ForkedClient, KvdError
from kvd.memory import HostSegment
from kvd_client.memory import libc
from kvd_client.memory.address_range import AddressRange
from tests.client.homes import host_only, let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.client.processes import run_python
from tests.support.daemon import Daemon
from tests.support.mappings import is_mapped
from tests.support.stopwatch import within
from tests.support.wait import eventually

PROMPT = list(range(300, 400))


def in_child(work: Callable[[], str]) -> str:
    """What `work` says, run in a forked child. The child must do little: other threads' locks stay locked there.

    Nothing when it blocks on one of them.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except ForkedClient:
        return "ForkedClient"
    except KvdError as error:
        return repr(error)
    return "no error"


# case B9
def test_a_forked_child_has_no_mapping_no_descriptor_and_a_typed_error(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq, cache.allocate_sequence(100) as other:
        fill(seq, PROMPT)
        seq.commit()
        address = seq.layer(0)[0].untyped_storage().data_ptr()

        def child() -> str:
            calls = (client.status, lambda: cache.sequence(PROMPT), lambda: cache.match(PROMPT))
            calls += (lambda: seq.layer(0), seq.commit, seq.fork, other.buffer)  # type: ignore[assignment]
            said = {outcome(call) for call in calls}
            seq.close()
            client.close()
            maps = Path("/proc/self/maps").read_text()
            inside = any(
                int(first, 16) <= address < int(last, 16) for first, last in re.findall(r"^(\w+)-(\w+)", maps, re.M)
            )
            links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
            memory = [link for link in links if "memfd:kvd" in link or "kvd" in link.rsplit("/", 1)[-1]]
            return f"{sorted(said)} {inside} {'memfd:kvd' in maps} {memory}"

        assert in_child(child) == "['ForkedClient'] False False []"
        # The parent is unharmed.
        assert holds(seq, PROMPT, 100)
        fill(seq, [*PROMPT, *[1] * 200])
        assert seq.commit([*PROMPT, *[1] * 200]) == 288
        client.check()


# case B9
@host_only("what is not on a card is mapped by ourselves")
def test_a_forked_child_has_no_copy_either_and_unmaps_nothing(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq, cache.sequence(PROMPT, materialize=True) as copied:
        addresses = [one.array(0, 100).data_ptr() for one in (seq, copied)]
        wake_fd = client._runner._current[1]._wake_fd

        def child() -> str:
            inherited = [*map(is_mapped, addresses), Path(f"/proc/self/fd/{wake_fd}").is_symlink()]
            for address in addresses:
                # The holes are somebody else's now.
                libc.mmap(address, 4096, libc.PROT_READ, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED)
            seq.close()
            copied.close()
            client.close()
            return f"{inherited} {[*map(is_mapped, addresses)]}"

        assert in_child(child) == "[False, False, False] [True, True]"


# case B9
def test_no_part_of_a_range_is_inherited() -> None:
    space = AddressRange(4 << 20)
    with HostSegment(1 << 20) as segment:
        space.map_file(0, 1 << 20, segment.read_only_fd, 0, writable=False)
        space.map_private(1 << 20, 2 << 20)
        space.forget(2 << 20, 1 << 20)
        places = [space.address + offset for offset in (0, 1 << 20, 2 << 20, 3 << 20)]
        assert all(map(is_mapped, places))
        assert in_child(lambda: str([is_mapped(place) for place in places])) == str([False] * 4)
        space.close()


# case B9
def test_a_range_that_a_child_drops_unmaps_nothing_there() -> None:
    box = [AddressRange(4 << 20)]
    place = box[0].address

    def child() -> str:
        # The hole is somebody else's now.
        libc.mmap(place, 4096, libc.PROT_READ, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED)
        box.clear()
        return str(is_mapped(place))

    assert in_child(child) == "True"
    box.clear()
    assert not is_mapped(place)


# case B9
def test_a_child_cannot_keep_its_parents_lease_alive(daemon: Daemon, client: kvd_client.Client) -> None:
    script = """
import os, sys
import kvd_client
from tests.client.kv import LAYOUT, MODEL, fill
client = kvd_client.connect(sys.argv[1])
seq = client.cache(model=MODEL, layout=LAYOUT).sequence(list(range(100)))
fill(seq, seq.token_ids)
seq.commit()
if os.fork():
    print(client.session_id, flush=True)
    os.kill(os.getpid(), 9)
os.close(1), os.close(2)
os.read(0, 1)  # until the test ends
os._exit(0)
"""
    reading, writing = os.pipe()
    saved = os.dup(0)
    os.dup2(reading, 0)
    try:
        finished = run_python(script, str(daemon.folder))
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(reading)
    try:
        session = int(finished.stdout)
        within(1.0, lambda: session not in [entry.session for entry in client.status().clients], daemon.pid)
        # On a card what was reserved may be written until the parent is wholly gone, a moment after its session.
        within(
            1.0,
            lambda: sum(pool.num_references + pool.num_reserved for pool in client.status().pools) == 0,
            daemon.pid,
        )
    finally:
        os.close(writing)


# case B9
def test_a_child_forked_while_another_thread_connects_again_can_still_close(
    daemon: Daemon, client: kvd_client.Client
) -> None:
    daemon.kill()
    daemon.start()
    os.kill(daemon.pid, signal.SIGSTOP)
    reconnecting = threading.Thread(target=client.status)
    try:
        reconnecting.start()
        # Held until the daemon greets, which it cannot before it goes on.
        eventually(client._runner._reconnecting.locked)

        def child() -> str:
            said = outcome(client.status)
            client.close()
            return said

        said = in_child(child)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        reconnecting.join()
    assert said == "ForkedClient"
    assert len(client.status().clients) == 1


# case B9
def test_a_child_forked_while_another_thread_uses_a_sequence_can_still_close_it(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq:
        held, done = threading.Event(), threading.Event()

        def use() -> None:
            with seq._exclusive:
                held.set()
                done.wait()

        using = threading.Thread(target=use)
        using.start()
        held.wait()

        def child() -> str:
            said = {outcome(call) for call in (seq.commit, seq.fork, lambda: seq.extend(500), lambda: seq.truncate(0))}
            seq.close()
            return str(said)

        try:
            assert in_child(child) == "{'ForkedClient'}"
        finally:
            done.set()
            using.join()


# case B9
def test_nobody_maps_while_the_process_forks(client: kvd_client.Client) -> None:
    def is_free() -> bool:
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(client._runner.link.guard.acquire_for_fork()))
        thread.start()
        thread.join()
        return found[0]

    assert client._runner.link.guard.acquire_for_fork()
    client._runner.link.guard.release_after_fork()
    kvd_client.session.fork._before()
    assert not is_free()
    kvd_client.session.fork._in_parent()
    assert is_free()
    client._runner.link.guard.release_after_fork()


def test_a_child_connects_for_itself(daemon: Daemon, client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()

    def child() -> str:
        with kvd_client.connect(daemon.folder) as own:
            seq = own.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
            return f"{seq.num_cached_tokens} {bytes(seq.buffer(0, 1))[:1] != b''}"

    assert in_child(child) == "96 True"
    client.check()


# case B9
def test_one_client_serves_many_threads(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    shared = [*range(64)]
    wrong: list[object] = []
    start = threading.Barrier(8)

    def hammer(number: int) -> None:
        try:
            start.wait()
            for turn in range(25):
                tokens = [*shared, *[number] * 16, *[turn] * 20]
                with cache.sequence(tokens, wait_s=0) as seq:
                    fill(seq, tokens)
                    seq.commit()
                    keys, _ = seq.layer(0)
                    with seq.fork() as other:
                        other.truncate(70)
                        if not holds(other, tokens, 70) or not holds(seq, tokens, 100):
                            wrong.append((number, turn))
                del keys, _
                cache.match(tokens)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # A view that outlived its sequence lets go of the card in another thread.
    let_go()
    client.check()
    (own,) = client.status().clients
    assert (own.num_references, own.num_reserved, own.num_announced) == (0, 0, 0)


def test_closing_while_a_thread_waits_ends_its_wait(daemon: Daemon, client: kvd_client.Client) -> None:
    announced = client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
    waiting = kvd_client.connect(daemon.folder)
    cache = waiting.cache(model=MODEL, layout=LAYOUT)
    said: list[str] = []

    def wait() -> None:
        try:
            cache.sequence(PROMPT, wait_s=60)
        except kvd_client.KvdError as error:
            said.append(type(error).__name__)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(entry.num_waiting for entry in client.status().clients) == 3)
    waiting.close()
    for thread in threads:
        thread.join()
    assert said == ["ClientClosed"] * 3
    announced.close()
