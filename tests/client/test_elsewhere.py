"""Who computes elsewhere than the pool is: the choice, and sequences that are copies (the CPU is the other device)."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import kvd_client
from kvd.errors import CudaDeviceLost, EngineUnsupported, InvalidRequest, KvdError, OutOfMemory
from kvd_client import aio
from kvd_client.memory import copied_storage, laying_out
from kvd_client.memory.compute_device import device_name, is_elsewhere
from kvd_client.memory.copied_storage import CopiedStorage
from kvd_client.memory.device_views import card_of, find_torch_device
from kvd_client.session import opened_cache
from tests.client.homes import let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.fakecuda.machine import P40, RTX_3050, FakeMachine
from tests.support.daemon import Daemon
from tests.support.wait import eventually

PROMPT = list(range(500, 600))
BLOCK = LAYOUT.block_nbytes

on_a_card = pytest.mark.parametrize("home", ["card"], indirect=True)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is not where anybody computes, not even who computes on the CPU."""
    monkeypatch.setattr(laying_out, "is_elsewhere", lambda computes_on, _shown: bool(computes_on))


@pytest.fixture
def published(client: kvd_client.Client) -> kvd_client.Cache:
    """A cache that maps the pool; it holds 96 tokens of PROMPT."""
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
    return cache


@pytest.fixture
def copying(client: kvd_client.Client, elsewhere: None) -> kvd_client.Cache:
    """The same namespace for who computes on the CPU, as if that were no host memory."""
    return client.cache(model=MODEL, layout=LAYOUT, staged=True, computes_on="cpu", checksums=True)


def holds_nothing(client: kvd_client.Client) -> bool:
    client.check()
    (own,) = client.status().clients
    return (own.num_references, own.num_reserved) == (0, 0)


@pytest.mark.parametrize(
    ("computes_on", "shown", "is_apart"),
    [
        (torch.device("cuda:0"), "cuda:0", False),
        (torch.device("cuda:1"), "cuda:0", True),
        (torch.device("cuda:0"), "cuda:1", True),
        (torch.device("cuda:1"), "cpu", True),
        (torch.device("cpu"), "cuda:0", True),
        (torch.device("cpu"), "cpu", False),
        (torch.device("cpu", 0), "cpu", False),
        (torch.device("cuda:0"), None, True),
        (torch.device("cpu"), None, True),
        (None, "cuda:0", False),
        (None, "cpu", False),
        (None, None, True),
    ],
)
def test_memory_serves_who_computes_where_it_is_shown(
    computes_on: torch.device | None, shown: str | None, is_apart: bool
) -> None:
    assert is_elsewhere(device_name(computes_on), shown) == is_apart


def test_a_device_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert [device_name(one) for one in ("cuda", "cuda:1", torch.device("cpu", 0))] == ["cuda:2", "cuda:1", "cpu"]
    with pytest.raises(EngineUnsupported, match="not on mps"):
        device_name("mps")
    for none in ("card", 3.5):
        with pytest.raises(InvalidRequest, match="torch device"):
            device_name(none)  # type: ignore[arg-type]


@on_a_card
def test_who_computes_on_another_card_is_staged_and_told_once(
    client: kvd_client.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_cache, "_told", set())
    with caplog.at_level(logging.WARNING):
        for salt in ("one", "two"):
            cache = client.cache(model=MODEL, layout=LAYOUT, salt=salt, computes_on="cuda:1")
            assert (cache.device, cache.mode) == ("host", "staged")
    (said,) = caplog.messages
    assert said.endswith("are used through host memory: they are attended over on cuda:1")
    with pytest.raises(EngineUnsupported, match="sees no card"):
        cache.sequence(PROMPT)
    assert holds_nothing(client)


@on_a_card
def test_who_computes_on_the_cpu_gets_at_a_card_that_it_sees_through_mapped_host_memory(
    client: kvd_client.Client, published: kvd_client.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_cache, "shown_on", lambda _uuid: "cuda:0")
    cache = client.cache(model=MODEL, layout=LAYOUT, computes_on="cpu")
    assert (cache.device, cache.mode) == ("host", "staged")
    other = [*PROMPT[:50], *range(50)]
    with cache.sequence(other, wait_s=10) as seq:
        assert (seq.num_cached_tokens, seq.num_copied_bytes) == (48, 0)
        fill(seq, other)
        seq.commit()
    eventually(lambda: published.match(other) == 96)
    assert client.cache(model=MODEL, layout=LAYOUT, computes_on="cuda:0").mode == "mapped"


async def test_the_asyncio_twin_takes_it_too(
    daemon: Daemon, published: kvd_client.Cache, elsewhere: None, home: FakeMachine | None
) -> None:
    async with await aio.connect(daemon.folder) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT, staged=True, computes_on="cpu")
        async with await cache.sequence(PROMPT, wait_s=10) as seq:
            assert seq.num_copied_bytes == 6 * BLOCK
            assert holds(seq, PROMPT, 96)


def test_host_memory_that_is_copied_to_a_card_is_told_once(
    client: kvd_client.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_cache, "_told", set())
    with caplog.at_level(logging.WARNING):
        for salt in ("one", "two"):
            client.cache(model=MODEL, layout=LAYOUT, salt=salt, device="host", computes_on="cuda:1")
            client.cache(model=MODEL, layout=LAYOUT, salt=salt, device="host", computes_on="cpu")
    assert caplog.messages == ["kvd: blocks in host memory are copied to cuda:1, where they are attended over"]


def test_a_copy_is_packed_counted_and_published(
    client: kvd_client.Client, published: kvd_client.Cache, copying: kvd_client.Cache
) -> None:
    longer = [*PROMPT, *[3] * 300]
    with copying.sequence(PROMPT, max_tokens=450, wait_s=10, verify=True) as seq:
        assert isinstance(seq._core._storage, CopiedStorage)
        assert seq.is_materialized
        assert (seq.num_cached_tokens, seq.num_copied_bytes) == (96, 6 * BLOCK)
        assert seq.layer(0)[0][0].is_contiguous()
        assert holds(seq, PROMPT, 96)
        early = seq.layer(1)[0]
        fill(seq, longer)
        # Growing moves what is held; views from before stay as they were.
        assert seq.num_copied_bytes > 6 * BLOCK
        assert torch.equal(early, seq.layer(1)[0][:, :96])
        assert seq.commit(longer) == 400
        assert holds(seq, longer, 400)
        assert bytes(seq.buffer(5, 9)) == seq.array(5, 9).contiguous().view(torch.uint8).numpy().tobytes()
        assert len(seq.buffer(5, 5)) == 0
    eventually(lambda: published.match([*longer, 1]) == 400)
    with published.sequence([*longer, 1], wait_s=10, verify=True) as mapped:
        assert holds(mapped, longer, 400)
        del early
    let_go()
    assert holds_nothing(client)


def test_forks_and_cuts_of_a_copy(
    client: kvd_client.Client, published: kvd_client.Cache, copying: kvd_client.Cache
) -> None:
    with copying.sequence(PROMPT, wait_s=10) as seq:
        fill(seq, PROMPT)
        seq.commit()
        with seq.fork() as other:
            kept = seq.layer(0)[0]
            seq.truncate(98)
            fill(seq, [*PROMPT[:98], 7, 8])
            seq.truncate(30)
            fill(seq, [*PROMPT[:30], *[8] * 30])
            assert holds(seq, [*PROMPT[:30], *[8] * 30], 60)
            assert holds(other, PROMPT, 100)
            assert torch.equal(kept, other.layer(0)[0])
    del kept
    let_go()
    assert holds_nothing(client)


def test_another_ones_blocks_take_the_place_of_ours_and_ours_go_back(
    client: kvd_client.Client, published: kvd_client.Cache, copying: kvd_client.Cache
) -> None:
    with copying.sequence([1, *PROMPT]) as one, copying.sequence([1, *PROMPT], wait_s=0) as two:
        for seq in (one, two):
            fill(seq, [1, *PROMPT])
            assert seq.commit() == 96
        assert two._core._own_copies == {}
        assert holds(two, [1, *PROMPT], 101)
    assert holds_nothing(client)


@pytest.mark.parametrize(("kind", "as_ours"), [(torch.OutOfMemoryError, OutOfMemory), (RuntimeError, CudaDeviceLost)])
def test_a_copy_that_fails_is_a_typed_error_and_holds_nothing(
    client: kvd_client.Client,
    published: kvd_client.Cache,
    copying: kvd_client.Cache,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[RuntimeError],
    as_ours: type[KvdError],
) -> None:
    def fail(*_arguments: object) -> None:
        raise kind("it broke")

    with monkeypatch.context() as patch:
        patch.setattr(copied_storage, "load_blocks", fail)
        with pytest.raises(as_ours, match="it broke"):
            copying.sequence(PROMPT, wait_s=10)
    with copying.sequence(PROMPT, wait_s=10) as seq:
        fill(seq, [*PROMPT, *[3] * 60])
        with monkeypatch.context() as patch:
            patch.setattr(copied_storage, "store_blocks", fail)
            with pytest.raises(as_ours, match="it broke"):
                seq.commit([*PROMPT, *[3] * 60])
        assert seq.commit() == 160
    let_go()
    assert holds_nothing(client)


def test_a_commit_waits_for_who_wrote(
    published: kvd_client.Cache, copying: kvd_client.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []
    with copying.sequence(PROMPT, wait_s=10) as seq:
        fill(seq, PROMPT)
        storage = seq._core._storage
        assert isinstance(storage, CopiedStorage)
        storage.synchronize(SimpleNamespace(synchronize=lambda: order.append("named")))
        monkeypatch.setattr(storage, "_torch_device", "cuda:1")
        monkeypatch.setattr(
            torch.cuda,
            "current_stream",
            lambda device: SimpleNamespace(synchronize=lambda: order.append(device)),
        )
        storage.synchronize(None)
        monkeypatch.setattr(storage, "_torch_device", "cpu")
        storage.synchronize(None)
        assert order == ["named", "cuda:1"]
        published_by = copied_storage.store_blocks
        monkeypatch.setattr(
            copied_storage, "store_blocks", lambda *given: (order.append("stored"), published_by(*given))[1]
        )
        seq.commit([*PROMPT, *[4] * 12], stream=SimpleNamespace(synchronize=lambda: order.append("commit")))
        assert order == ["named", "cuda:1"], "nothing to seal, nothing to wait for"
        fill(seq, [*PROMPT, *[4] * 12])
        seq.commit(stream=SimpleNamespace(synchronize=lambda: order.append("commit")))
        assert order[2:] == ["commit", "stored"]


def test_a_card_is_known_by_its_uuid_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prints them without the GPU- that the driver's tools put before."""
    numbers = [one.uuid.removeprefix("GPU-").upper() for one in (RTX_3050, P40)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=numbers[index]))
    find_torch_device.cache_clear()
    found = [find_torch_device(uuid) for uuid in (P40.uuid, RTX_3050.uuid, P40.uuid.replace("a0b1", "ffff"))]
    find_torch_device.cache_clear()
    assert found == ["cuda:1", "cuda:0", None]
    assert card_of(1) == P40.uuid
