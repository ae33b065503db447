"""Clients of pools on a card: order, death, revokes, and the way out for whoever cannot map the card."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvd_client
import kvd_client.aio
from kvd.cuda import Stream, address_of
from kvd.errors import CudaUnavailable, DaemonRestarted, EngineUnsupported, OutOfBlocks
from kvd.layout import KVLayout
from kvd.protocol.requests import Release, Request
from kvd.protocol.session import Farewell
from kvd_client.memory import device_imports, device_storage
from kvd_client.memory.device_pieces import DirectPiece
from kvd_client.memory.device_segments import DevicePoolMemory
from kvd_client.memory.device_storage import DeviceStorage
from kvd_client.session import opened_cache
from kvd_client.session.session_socket import SessionSocket
from tests.client.homes import CARDS, fake_machine, let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds, keys_values
from tests.client.processes import Worker, run_python
from tests.fakecuda.machine import MIB, FakeMachine
from tests.support.daemon import Daemon, running_daemon
from tests.support.wait import eventually

PROMPT = list(range(700, 800))
P40, RTX_3050 = CARDS
OTHER_LAYOUT = KVLayout(num_layers=6, num_kv_heads=2, head_dim=64, block_tokens=16)
"""Another block size, so another pool."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMachine]:
    """Only on a card."""
    with fake_machine(tmp_path_factory.mktemp("machine")) as machine:
        yield machine


@pytest.fixture
def small(tmp_path: Path, home: FakeMachine) -> Iterator[Daemon]:
    """Four segments in all."""
    with running_daemon(tmp_path, name="small", budget="16MiB", segment="4MiB", machine=home) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_cache, "_told", set())


def publish(cache: kvd_client.Cache, tokens: list[int] = PROMPT) -> None:
    with cache.sequence(tokens) as seq:
        fill(seq, tokens)
        seq.commit()


def own_figures(client: kvd_client.Client) -> tuple[int, int]:
    client.check()
    (own,) = [entry for entry in client.status().clients if entry.session == client.session_id]
    return own.num_references, own.num_reserved


# Where blocks are.


def test_a_cache_on_a_card_is_mapped_and_says_so(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    assert (cache.device, cache.mode) == (P40.uuid, "mapped")
    publish(cache)
    with cache.sequence(PROMPT) as seq:
        assert seq.num_cached_tokens == 96
        assert seq.num_copied_bytes == 0
        assert holds(seq, PROMPT, 96)
        with pytest.raises(EngineUnsupported, match="on a GPU"):
            seq.buffer()


def test_host_memory_beside_the_card_is_used_by_who_asks(client: kvd_client.Client) -> None:
    publish(client.cache(model=MODEL, layout=LAYOUT))
    staged = client.cache(model=MODEL, layout=LAYOUT, staged=True)
    assert (staged.device, staged.mode) == ("host", "staged")
    with staged.sequence(PROMPT, wait_s=10) as seq:
        assert seq.num_cached_tokens == 96
        assert holds(seq, PROMPT, 96)
        assert bytes(seq.buffer(0, 16)) == seq.array(0, 16).contiguous().view(torch.uint8).numpy().tobytes()
    host = client.cache(model=MODEL, layout=LAYOUT, device="host")
    assert (host.device, host.mode) == ("host", "mapped")
    assert host.match(PROMPT) == 0


def test_a_card_that_the_daemon_does_not_serve_is_refused(client: kvd_client.Client) -> None:
    with pytest.raises(CudaUnavailable, match=RTX_3050.uuid):
        client.cache(model=MODEL, layout=LAYOUT, device=RTX_3050.uuid)


def test_who_only_asks_needs_no_card(daemon: Daemon, client: kvd_client.Client) -> None:
    publish(client.cache(model=MODEL, layout=LAYOUT))
    script = """
import sys
import kvd_client
from kvd.layout import KVLayout
with kvd_client.connect(sys.argv[1]) as client:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=64, block_tokens=16)
    cache = client.cache(model="test@1", layout=layout, ask_only=True)
    print(cache.match(range(700, 800)), cache.mode, "torch" in sys.modules)
"""
    finished = run_python(script, str(daemon.folder))
    assert finished.stdout.split() == ["96", "mapped", "False"], finished.stderr


async def test_the_asyncio_twin_shows_parts_too(daemon: Daemon) -> None:
    async with kvd_client.aio.connect(daemon.folder) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT)
        assert (cache.device, cache.mode) == (P40.uuid, "mapped")
        async with await cache.sequence(PROMPT) as seq:
            for layer in range(3):
                await seq.append(layer, *keys_values(layer, PROMPT, 0, 100))
            assert await seq.commit(stream=None) == 96
            assert holds(seq, PROMPT, 100)


def test_a_sequence_without_a_block_shows_nothing_and_grows(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.folder, reserve_ahead_tokens=0) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        for materialize in (False, True):
            with cache.sequence(PROMPT, max_tokens=100, wait_s=0, materialize=materialize) as seq:
                fill(seq, PROMPT)
                seq.commit()
                seq.truncate(0)
                assert seq.capacity_tokens == 0
                assert [keys.shape for keys, _ in seq.parts(0)] == [(2, 0, 64)]
                assert seq.array().shape == (0, 3, 2, 2, 64)
                assert seq.commit() == 0
                seq.add_tokens(PROMPT)
                fill(seq, PROMPT)
                assert seq.is_materialized == materialize
                assert holds(seq, PROMPT, 100)


# Who cannot map the card.


def share_both_ways(cache: kvd_client.Cache, apart: Worker) -> None:
    """What is on the card is found beside it, and what was computed beside it on the card."""
    other = [*PROMPT[:50], *range(50)]
    assert apart.call("begin", tokens=PROMPT, wait_s=10) == 96
    assert apart.call("holds") is True
    assert apart.call("publish", tokens=other, wait_s=10) == 96
    eventually(lambda: cache.match(other) == 96)
    with cache.sequence(other, wait_s=10) as seq:
        assert holds(seq, other, 96)


@pytest.mark.parametrize(
    ("prefix", "environ"),
    [
        (["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"], {}),
        ([], {"CUDA_VISIBLE_DEVICES": "1"}),
        ([], {"CUDA_VISIBLE_DEVICES": RTX_3050.uuid}),
        ([], {"CUDA_VISIBLE_DEVICES": ""}),
        ([], {"KVD_LIBCUDA": "/nowhere/libcuda.so.1"}),
    ],
    ids=["other PID namespace", "other card by number", "other card by UUID", "no card", "no driver"],
)
def test_a_process_that_cannot_map_the_card_shares_blocks_through_host_memory(
    daemon: Daemon, client: kvd_client.Client, prefix: list[str], environ: dict[str, str]
) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    publish(cache)
    with Worker(daemon.folder, prefix=prefix, **environ) as apart:
        assert apart.call("where") == ["host", "staged"]
        share_both_ways(cache, apart)
    # case B15
    eventually(lambda: len(client.status().clients) == 1)
    client.check()


@pytest.mark.parametrize("visible", ["0,1", "1,0", P40.uuid, f"{RTX_3050.uuid},{P40.uuid}"])
def test_a_process_that_counts_cards_otherwise_maps_the_same_one(
    daemon: Daemon, client: kvd_client.Client, visible: str
) -> None:
    publish(client.cache(model=MODEL, layout=LAYOUT))
    with Worker(daemon.folder, CUDA_VISIBLE_DEVICES=visible) as other:
        assert other.call("where") == [P40.uuid, "mapped"]
        assert other.call("begin", tokens=PROMPT) == 96
        assert other.call("holds") is True


def test_two_cards_without_peer_access_share_blocks_through_host_memory(
    daemon: Daemon, client: kvd_client.Client
) -> None:
    """Who computes on the second card sees both, as most people start their processes."""
    cache = client.cache(model=MODEL, layout=LAYOUT)
    publish(cache)
    with Worker(daemon.folder) as second:
        assert second.call("compute_elsewhere") == ["host", "staged"]
        share_both_ways(cache, second)
        # It found the card by its UUID, and never tried to open the card's memory.
        assert second.call("num_driver_calls", function="cuDeviceGetUuid") > 0
        assert second.call("num_driver_calls", function="cuIpcOpenMemHandle_v2") == 0
    eventually(lambda: len(client.status().clients) == 1)
    client.check()


def test_two_cards_meet_in_the_tiers_below(tmp_path: Path, home: FakeMachine) -> None:
    """What was computed on one card the other finds, and computes no more, though neither reads the other's memory."""
    rule = {"name": "small", "models": ["small*"], "device": f"cuda:{RTX_3050.uuid}"}
    tiers = {"host": {"budget": 32 * MIB}, "redis": {"url": ""}}
    with (
        running_daemon(
            tmp_path, name="two", budget="16MiB", segment="4MiB", pools=[rule], tiers=tiers, machine=home
        ) as two,
        kvd_client.connect(two.folder) as client,
    ):
        first, second = (client.cache(model=MODEL, layout=LAYOUT, device=card.uuid) for card in CARDS)
        assert [(cache.device, cache.mode) for cache in (first, second)] == [(card.uuid, "mapped") for card in CARDS]
        publish(first)
        eventually(lambda: client.spill() == 0)
        with second.sequence(PROMPT, wait_s=10) as seq:
            assert seq.num_cached_tokens == 96
            assert holds(seq, PROMPT, 96)
        mover = client.status().mover
        assert mover is not None
        assert (mover.counters["spilled"], mover.counters["promoted"]) == (6, 6)
        client.check()


def test_a_process_without_torch_uses_bytes_in_host_memory(daemon: Daemon, client: kvd_client.Client) -> None:
    publish(client.cache(model=MODEL, layout=LAYOUT))
    script = """
import sys
sys.modules["torch"] = None
import kvd_client
from kvd.layout import KVLayout
client = kvd_client.connect(sys.argv[1])
cache = client.cache(model="test@1", layout=KVLayout(num_layers=3, num_kv_heads=2, head_dim=64, block_tokens=16))
with cache.sequence(range(700, 800), wait_s=10) as seq:
    print(cache.mode, seq.num_cached_tokens, bytes(seq.buffer(0, 16)).hex())
client.close()
"""
    finished = run_python(script, str(daemon.folder))
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq:
        right = seq.array(0, 16).contiguous().view(torch.uint8).numpy().tobytes().hex()
    assert finished.stdout.split() == ["staged", "96", right], finished.stderr
    assert "no torch in this process" in finished.stderr


def test_a_torch_that_does_not_see_the_card_is_told_once(
    daemon: Daemon, client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client.cache(model=MODEL, layout=LAYOUT))
    driver = device_imports.shared_driver()
    monkeypatch.setattr(driver, "devices", tuple(replace(each, is_cpu_touchable=False) for each in driver.devices))
    with caplog.at_level(logging.WARNING), kvd_client.connect(daemon.folder) as other:
        for salt in ("", "a", "b"):
            cache = other.cache(model=MODEL, layout=LAYOUT, salt=salt)
            assert cache.mode == "staged"
        with other.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT, wait_s=10) as seq:
            assert holds(seq, PROMPT, 96)
    (said,) = caplog.messages
    assert f"blocks on {P40.uuid} are used through host memory: this torch" in said


@pytest.mark.parametrize("code", [201, 217], ids=["another context", "no peer access"])
def test_a_sequence_that_the_driver_does_not_map_is_staged_and_the_next_is_not(
    code: int,
    client: kvd_client.Client,
    home: FakeMachine,
    caplog: pytest.LogCaptureFixture,
    start_worker: Callable[[], Worker],
) -> None:
    assert start_worker().call("publish", tokens=PROMPT) == 96
    cache = client.cache(model=MODEL, layout=LAYOUT)
    home.fail(f"cuIpcOpenMemHandle_v2:*={code}")
    with caplog.at_level(logging.WARNING), cache.sequence(PROMPT, wait_s=10) as seq:
        assert seq.num_cached_tokens == 96
        assert holds(seq, PROMPT, 96)
        fill(seq, PROMPT)
        assert bytes(seq.buffer(0, 1))
        with cache.allocate_sequence(30) as room:
            assert room.buffer(0, 30).nbytes == 30 * LAYOUT.token_nbytes
    assert len(caplog.messages) == 1
    home.fail("")
    assert own_figures(client) == (0, 0)
    assert cache.mode == "mapped"
    with cache.sequence(PROMPT) as seq:
        assert isinstance(seq._core._storage, DeviceStorage)
        assert holds(seq, PROMPT, 96)


def test_memory_that_is_mapped_but_cannot_be_shown_is_staged_too(client: kvd_client.Client, home: FakeMachine) -> None:
    home.fail("cuPointerGetAttribute:*=1")
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq:
        home.fail("")
        fill(seq, PROMPT)
        assert seq.commit() == 96
        assert bytes(seq.buffer(0, 1))
    assert own_figures(client) == (0, 0)


# Order.


def write_later(seq: kvd_client.Sequence, tokens: list[int]) -> Stream:
    """Writes all of a sequence in one part with a copy that nobody has waited for."""
    (piece,) = seq._core._storage._pieces  # type: ignore[attr-defined]
    assert isinstance(piece, DirectPiece)
    assert piece._segment is not None
    right = torch.empty(len(tokens), LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim, dtype=torch.float16)
    for layer in range(LAYOUT.num_layers):
        keys, values = keys_values(layer, tokens, 0, len(tokens))
        right[:, layer, 0], right[:, layer, 1] = keys.transpose(0, 1), values.transpose(0, 1)
    source = bytearray(right.view(torch.uint8).numpy().tobytes())
    stream = piece._segment.context.new_stream()
    stream.upload(seq.array(0, 1).data_ptr(), address_of(source), len(source))
    seq.advance(len(tokens))
    return stream


def test_a_commit_waits_for_the_stream_that_wrote(
    client: kvd_client.Client, start_worker: Callable[[], Worker]
) -> None:
    reader = start_worker()
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq:
        stream = write_later(seq, PROMPT)
        assert not holds(seq, PROMPT, 100), "the copy is done only when somebody waits for it"
        assert seq.commit(stream=stream) == 96
        assert reader.call("begin", tokens=PROMPT) == 96
        assert reader.call("holds") is True
    stream.close()


def test_a_commit_waits_for_the_default_stream_where_torch_has_none(
    client: kvd_client.Client, start_worker: Callable[[], Worker]
) -> None:
    reader = start_worker()
    with client.cache(model=MODEL, layout=LAYOUT, checksums=True).sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        address, nbytes = seq.array(0, 96).data_ptr(), 96 * LAYOUT.token_nbytes
        right = bytearray(seq.array(0, 96).contiguous().view(torch.uint8).numpy().tobytes())
        seq.array(0, 96).zero_()
        (piece,) = seq._core._storage._pieces  # type: ignore[attr-defined]
        # From pageable memory it returns before the bytes are there.
        piece._segment.context.call("cuMemcpyHtoD_v2", address, address_of(right), nbytes)
        assert not holds(seq, PROMPT, 100)
        assert seq.commit() == 96
        assert reader.call("begin", tokens=PROMPT) == 96
        assert reader.call("holds") is True
    # Its checksums were taken of what is there.
    cache = client.cache(model=MODEL, layout=LAYOUT)
    cache.sequence(PROMPT, verify=True).close()


@pytest.mark.parametrize("end", ["close", "tensor", "collected", "cut", "duplicate"])
def test_no_block_goes_back_before_the_card_is_done_with_it(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    order: list[str] = []
    link = client._runner.link
    post = link.post

    def watch(request: Request) -> None:
        if isinstance(request, Release) and (request.blocks or request.reserved):
            order.append("release")
        post(request)

    def wait(_segment: object) -> None:
        order.append("wait")

    seq = cache.sequence(PROMPT, wait_s=0)
    fill(seq, PROMPT)
    if end == "duplicate":
        publish_as_another(cache)
    monkeypatch.setattr(device_storage, "wait_for_device", wait)
    monkeypatch.setattr(link, "post", watch)
    if end == "close":
        seq.close()
    elif end == "tensor":
        keys = seq.layer(0)[0]
        seq.close()
        assert "release" not in order
        order.clear()
        del keys
    elif end == "collected":
        del seq
    elif end == "cut":
        seq.commit()
        seq.truncate(50)
    else:
        seq.commit()
    let_go()
    assert order[0] == "wait"
    assert order.count("release") == 1
    if end in {"cut", "duplicate"}:
        seq.close()


def publish_as_another(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT, wait_s=0) as first:
        fill(first, PROMPT)
        first.commit()


# Death.


# case B1
def test_a_killed_client_leaves_the_pool_whole_and_its_memory_to_the_others(
    client: kvd_client.Client, daemon: Daemon, home: FakeMachine, start_worker: Callable[[], Worker]
) -> None:
    writer, reader = start_worker(), start_worker()
    assert writer.call("publish", tokens=PROMPT) == 96
    assert reader.call("begin", tokens=PROMPT) == 96
    before = home.held_nbytes()
    writer.kill()
    assert reader.call("holds") is True
    eventually(lambda: sum(pool.num_references for pool in client.status().pools) == 6)
    reader.kill()
    eventually(lambda: sum(pool.num_references + pool.num_reserved for pool in client.status().pools) == 0)
    client.check()
    assert home.held_nbytes() == before, "the daemon has it still, and nobody else"
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq:
        assert holds(seq, PROMPT, 96)


@pytest.mark.parametrize("viewed", [False, True])
def test_the_daemon_hears_of_the_end_when_nothing_is_mapped_any_more(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, viewed: bool
) -> None:
    heard: list[tuple[str, int]] = []
    owner = kvd_client.connect(daemon.folder)
    seq = owner.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
    keys = [seq.layer(0)[0]]
    if not viewed:
        keys.clear()
    session = owner._runner.link.session
    send, close = session.send, session.close

    def tell(message: Farewell, *, wait_s: float) -> bool:
        heard.append((type(message).__name__, device_imports.num_open()))
        return send(message, wait_s=wait_s)

    monkeypatch.setattr(session, "send", tell)
    monkeypatch.setattr(session, "close", lambda: heard.append(("close", device_imports.num_open())) or close())
    owner.close()
    if viewed:
        assert heard == []
        keys.clear()
        del seq
        eventually(lambda: len(heard) == 2)
    assert heard == [("Farewell", 0), ("close", 0)]


@pytest.mark.filterwarnings("ignore:Exception ignored in. .function (Context|Socket).__del__")  # of ZeroMQ
def test_a_client_that_is_dropped_lets_go_and_says_so(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type] = []
    send = SessionSocket.send

    def tell(session: SessionSocket, message: Farewell, *, wait_s: float) -> bool:
        if session is its_session:
            told.append(type(message))
        return send(session, message, wait_s=wait_s)

    monkeypatch.setattr(SessionSocket, "send", tell)
    with kvd_client.connect(daemon.folder) as observer:
        dropped = kvd_client.connect(daemon.folder)
        its_session = dropped._runner.link.session
        seq = dropped.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
        fill(seq, PROMPT)
        del dropped, seq
        # A sequence first, then its session.
        eventually(lambda: let_go() or len(observer.status().clients) == 1)
        assert told == [Farewell]
        assert device_imports.num_open() == 0
        assert sum(pool.num_reserved for pool in observer.status().pools) == 0


# case B12
def test_memory_of_a_killed_daemon_goes_when_its_clients_let_go(
    daemon: Daemon, home: FakeMachine, start_worker: Callable[[], Worker]
) -> None:
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        seq = cache.sequence(PROMPT)
        fill(seq, PROMPT)
        seq.commit()
        worker = start_worker()
        assert worker.call("begin", tokens=PROMPT) == 96
        keys, _values = seq.layer(1)
        daemon.kill()
        daemon.start()
        assert home.held_nbytes() >= 4 * MIB, "the importers keep it"
        for call in (seq.commit, client.status, lambda: cache.sequence(PROMPT)):
            with pytest.raises(DaemonRestarted):
                call()
        assert worker.call("holds") is True
        assert worker.call("match", tokens=PROMPT)[0] == "DaemonRestarted"
        worker.call("close_sequence")
        seq.close()
        assert torch.equal(keys, keys_values(1, PROMPT, 0, 100)[0])
        del keys, _values
        let_go()
        assert device_imports.num_open() == 0
        # The worker's mapping went with its sequence; the new daemon has its first segment and no more.
        assert worker.call("match", tokens=PROMPT) == 0
        eventually(lambda: home.held_nbytes() == 4 * MIB)
        publish(cache)
        with cache.sequence(PROMPT) as again:
            assert holds(again, PROMPT, 96)


# Revokes.


PER_SEGMENT = 4 * MIB // LAYOUT.block_nbytes
LONG = [number % 1000 for number in range(3 * PER_SEGMENT * LAYOUT.block_tokens)]
"""Three of the four segments."""


def take_three_segments(client: kvd_client.Client) -> None:
    """Of which two must come from the pool of the others, who keep one as every pool does."""
    num_blocks = 3 * (4 * MIB // OTHER_LAYOUT.block_nbytes)
    cache = client.cache(model="large", layout=OTHER_LAYOUT)
    # The daemon waits for a second only, and clients that share two cores may need longer.
    for attempt in range(10):
        try:
            cache.allocate_sequence(num_blocks * OTHER_LAYOUT.block_tokens).close()
        except OutOfBlocks:
            if attempt == 9:
                raise
        else:
            return


def test_an_idle_client_lets_go_of_what_the_daemon_wants_back(small: Daemon) -> None:
    with Worker(small.folder) as idle, kvd_client.connect(small.folder) as client:
        idle.call("publish", tokens=LONG)
        idle.call("close_sequence")
        take_three_segments(client)
        assert idle.call("publish", tokens=PROMPT) == 96
        assert idle.call("holds") is True
        client.check()


def test_a_session_that_has_opened_nothing_lets_go_too(small: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvd_client.connect(small.folder) as idle, kvd_client.connect(small.folder) as client:

        def fail(*_arguments: object, **_options: object) -> None:
            raise ArithmeticError

        # Granted, and given back unopened.
        with monkeypatch.context() as patch:
            patch.setattr(DeviceStorage, "fill", fail)
            patch.setattr(DevicePoolMemory, "await_grants", lambda *_arguments, **_options: None)
            with pytest.raises(ArithmeticError):
                idle.cache(model=MODEL, layout=LAYOUT).sequence(LONG)
        assert device_imports.num_open() == 0
        take_three_segments(client)
        client.check()


def test_a_closed_client_whose_tensors_live_lets_go_of_the_rest(small: Daemon) -> None:
    with kvd_client.connect(small.folder) as client:
        owner = kvd_client.connect(small.folder)
        cache = owner.cache(model=MODEL, layout=LAYOUT)
        seq = cache.sequence(PROMPT)
        cache.allocate_sequence(2 * PER_SEGMENT * LAYOUT.block_tokens).close()
        fill(seq, PROMPT)
        keys = seq.layer(0)[0]
        owner.close()
        take_three_segments(client)
        assert torch.equal(keys, keys_values(0, PROMPT, 0, 100)[0])
        del keys, seq
        let_go()
        eventually(lambda: len(client.status().clients) == 1)


# Parts, from a real daemon.


def test_a_sequence_in_two_parts_is_gathered_for_who_wants_one(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    publish(cache)
    with cache.sequence(PROMPT) as first, cache.sequence([*PROMPT[:48], *[3] * 60], wait_s=0) as seq:
        tokens = [*PROMPT[:48], *[3] * 60]
        fill(seq, tokens)
        assert [keys.shape[1] for keys, _ in seq.parts(1)] == [48, 60]
        assert seq.num_copied_bytes == 0
        keys, _values = seq.layer(1)
        assert torch.equal(keys, keys_values(1, tokens, 0, 108)[0])
        copied = seq.num_copied_bytes
        assert copied > 0
        assert len(seq.parts(2)) == 1
        assert seq.array(40, 60).shape[0] == 20
        assert seq.num_copied_bytes == copied
        assert seq.commit(tokens) == 96
        assert holds(seq, tokens, 108)
        assert holds(first, PROMPT, 96)
    with cache.sequence(tokens) as again:
        assert holds(again, tokens, 96)


def test_threads_that_never_saw_the_card_use_it(client: kvd_client.Client) -> None:
    wrong: list[object] = []

    def use(number: int) -> None:
        try:
            tokens = [number] * 60
            with client.cache(model=MODEL, layout=LAYOUT).sequence(tokens, wait_s=0) as seq:
                fill(seq, tokens)
                seq.commit()
                if not holds(seq, tokens, 60):
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# case D6
def test_two_hundred_sessions_leave_no_import(daemon: Daemon, home: FakeMachine) -> None:
    def cycle() -> None:
        with kvd_client.connect(daemon.folder) as client:
            cache = client.cache(model=MODEL, layout=LAYOUT)
            with cache.sequence(PROMPT, wait_s=0) as seq:
                fill(seq, PROMPT)
                seq.commit()
        assert device_imports.num_open() == 0, "closed when the client is"

    for _ in range(10):
        cycle()
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    opens = home.num_calls("cuIpcOpenMemHandle_v2")
    for _ in range(200):
        cycle()
    gc.collect()
    assert home.num_calls("cuIpcOpenMemHandle_v2") == opens + 200
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert "fakecuda-" not in Path("/proc/self/maps").read_text()
