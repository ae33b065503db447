"""Tensors that outlive what they came from, and what must come back when everything is over."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import kvd_client
from kvd.errors import DaemonRestarted, EngineUnsupported, RequestTimeout
from kvd.protocol.requests import Release, Request
from tests.client.homes import host_only, let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds, keys_values
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import Daemon, descriptors_of
from tests.support.mappings import permissions
from tests.support.wait import eventually

PROMPT = list(range(200, 300))


def figures(client: kvd_client.Client) -> dict[int, tuple[int, int]]:
    client.check()
    return {entry.session: (entry.num_references, entry.num_reserved) for entry in client.status().clients}


def full_sequence(client: kvd_client.Client) -> kvd_client.Sequence:
    seq = client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
    fill(seq, PROMPT)
    seq.commit()
    return seq


# case B14
@pytest.mark.parametrize("derive", ["layer", "array", "slice", "buffer"])
def test_the_bytes_under_a_live_view_stay_until_it_dies(
    client: kvd_client.Client, home: FakeMachine | None, derive: str
) -> None:
    seq = full_sequence(client)
    view: object
    if derive == "buffer" and home is not None:
        with pytest.raises(EngineUnsupported, match="on a GPU"):
            seq.buffer(0, 100)
        return
    if derive == "buffer":
        view = seq.buffer(0, 100)[10:20]
        right: object = bytes(view)
    else:
        view = {"layer": seq.layer(1)[0], "array": seq.array(), "slice": seq.array().transpose(0, 1)[1:2, 3:50]}[derive]
        right = view.clone()
    seq.close()
    let_go()
    session = client.session_id
    assert figures(client)[session][0] == 6
    # Whoever wants all memory cannot have these blocks.
    cache = client.cache(model=MODEL, layout=LAYOUT, salt="other")
    free = sum(pool.num_free for pool in client.status().pools)
    with cache.allocate_sequence(free * 16) as noise:
        noise.array(0, free * 16).fill_(9)
    if isinstance(view, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert torch.equal(view, right)
    else:
        assert bytes(view) == right  # type: ignore[call-overload]
    del view
    let_go()
    assert figures(client)[session] == (0, 0)


# case B14
def test_the_last_view_may_die_in_another_thread(client: kvd_client.Client) -> None:
    seq = full_sequence(client)
    box = [seq.layer(0)]
    seq.close()
    assert figures(client)[client.session_id] != (0, 0)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    let_go()
    assert figures(client)[client.session_id] == (0, 0)


# case B14
def test_a_tensor_alone_keeps_its_block_and_the_session(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.folder) as observer:

        def tensor() -> torch.Tensor:
            client = kvd_client.connect(daemon.folder)
            seq = full_sequence(client)
            seq.truncate(50)
            keys = seq.layer(1)[0]
            client.close()
            return keys

        keys = tensor()
        gc.collect()
        assert len(figures(observer)) == 2
        assert torch.equal(keys, keys_values(1, PROMPT, 0, 50)[0])
        del keys
        eventually(lambda: len(figures(observer)) == 1)


# case B14
@host_only("what is unmapped is a mapping")
@pytest.mark.parametrize("is_viewed", [False, True])
def test_what_goes_back_is_unmapped_before(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch, is_viewed: bool
) -> None:
    seq = full_sequence(client)
    address, link = seq.array().data_ptr(), client._runner.link
    post, found = link.post, []

    def watch(request: Request) -> None:
        if isinstance(request, Release) and (request.blocks or request.reserved):
            found.append(permissions(address))
        post(request)

    monkeypatch.setattr(link, "post", watch)
    view = seq.layer(0) if is_viewed else None
    seq.close()
    assert found == ([] if is_viewed else [""])
    del view
    let_go()
    assert found == [""]


def test_a_sequence_that_is_dropped_is_closed(client: kvd_client.Client) -> None:
    seq = full_sequence(client)
    seq.layer(0)
    cycle = [seq]
    cycle.append(cycle)  # type: ignore[arg-type]
    del seq, cycle
    let_go()
    assert figures(client)[client.session_id] == (0, 0)


def test_a_closed_clients_session_stays_as_long_as_a_tensor_needs_it(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.folder) as observer:
        client = kvd_client.connect(daemon.folder)
        seq, other = full_sequence(client), full_sequence(client)
        keys, _values = seq.layer(2)
        assert holds(other, PROMPT, 100)
        client.close()
        # What no view keeps went back at once; the rest is still the session's.
        assert figures(observer)[client.session_id][0] == 6
        assert torch.equal(keys, keys_values(2, PROMPT, 0, 100)[0])
        del keys, _values
        eventually(lambda: client.session_id not in figures(observer))


# case B12
# case B14
def test_a_session_that_is_given_up_keeps_what_is_mapped_until_nothing_is(
    daemon: Daemon, client: kvd_client.Client
) -> None:
    seq, session = full_sequence(client), client.session_id
    with kvd_client.connect(daemon.folder) as other:
        held = figures(other)[session]
        tensor = seq.layer(1)[0]
        client._runner.link.lose(RequestTimeout("the daemon lives, and did not answer in time"))
        assert figures(other)[session] == held == (6, held[1])
        seq.close()
        assert figures(other)[session] == held
        assert torch.equal(tensor, keys_values(1, PROMPT, 0, 100)[0])
        del tensor
        let_go()
        eventually(lambda: session not in figures(other))
    # It holds nothing now, so it connects again.
    assert figures(client) == {client.session_id: (0, 0)}


@pytest.mark.parametrize("home", ["card"], indirect=True)
def test_the_daemons_end_is_heard_though_the_client_was_closed_before(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.folder) as client:
        seq, link = full_sequence(client), client._runner.link
        tensor = seq.layer(1)[0]
    assert link.session.fileno() >= 0, "a tensor needs it"
    daemon.kill()
    # Or whoever reads it would be told of the end again and again.
    eventually(lambda: link.session.fileno() == -1)
    assert torch.equal(tensor, keys_values(1, PROMPT, 0, 100)[0])
    del tensor
    let_go()


def test_tensors_outlive_the_daemon(daemon: Daemon, client: kvd_client.Client) -> None:
    seq = full_sequence(client)
    keys, _values = seq.layer(1)
    daemon.kill()
    with pytest.raises(DaemonRestarted):
        seq.extend(1000)
    assert torch.equal(keys, keys_values(1, PROMPT, 0, 100)[0])
    assert holds(seq, PROMPT, 100)
    # What is reserved already can still be written: an engine finishes its step.
    fill(seq, [*PROMPT, 1, 2, 3])
    assert holds(seq, [*PROMPT, 1, 2, 3], 103)
    seq.close()
    client.close()
    assert torch.equal(keys, keys_values(1, PROMPT, 0, 100)[0])


def resources(pid: int) -> tuple[int, int, int]:
    """Mappings, descriptors, resident KiB."""
    maps = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    rss = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return maps, len(descriptors_of(pid)), int(rss.split()[1])


# case D6
def test_two_hundred_attaches_leave_nothing_behind(daemon: Daemon, client: kvd_client.Client) -> None:
    full_sequence(client).close()
    cache = client.cache(model=MODEL, layout=LAYOUT)

    def cycle(index: int) -> None:
        with cache.sequence([*PROMPT, index]) as seq:
            assert holds(seq, PROMPT, 96)
            fill(seq, [*PROMPT, index])
            seq.commit()
            seq.fork().close()

    for index in range(20):
        cycle(index)
    let_go()
    before = resources(os.getpid()), resources(daemon.pid)
    for index in range(200):
        cycle(index)
    let_go()
    for (maps, fds, rss), (maps_then, fds_then, rss_then) in zip(
        (resources(os.getpid()), resources(daemon.pid)), before, strict=True
    ):
        assert maps <= maps_then + 3
        assert fds == fds_then
        assert rss <= rss_then + 4096
    assert figures(client)[client.session_id] == (0, 0)


# case D6
def test_two_hundred_sessions_leave_nothing_behind(daemon: Daemon, client: kvd_client.Client) -> None:
    def cycle() -> None:
        with kvd_client.connect(daemon.folder) as other:
            full_sequence(other).close()

    for _ in range(20):
        cycle()
    let_go()
    before = resources(os.getpid()), resources(daemon.pid)
    for _ in range(200):
        cycle()
    let_go()
    eventually(lambda: len(client.status().clients) == 1)
    for (maps, fds, rss), (maps_then, fds_then, rss_then) in zip(
        (resources(os.getpid()), resources(daemon.pid)), before, strict=True
    ):
        assert maps <= maps_then + 5
        assert fds <= fds_then
        assert rss <= rss_then + 6144
