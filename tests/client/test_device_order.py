"""Waiting for a card, through torch where it has one, and what becomes of a card that is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvd_client
from kvd.errors import CudaDeviceLost, OutOfMemory
from kvd_client.memory import device_order, device_views
from kvd_client.memory.device_order import wait_for_device, wait_for_stream
from kvd_client.memory.device_views import DeviceViews, private_views
from tests.client.homes import fake_machine, let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.support.daemon import running_daemon

PROMPT = list(range(900, 1000))
UUID = "GPU-a0b1c2d3-e4f5-0011-2233-445566778899"


class Waits:
    """Something to wait for that takes note of it, or fails."""

    def __init__(self, order: list[str], name: str, error: Exception | None = None) -> None:
        self.order, self.name, self.error = order, name, error
        self.lost: str | None = None

    def synchronize(self) -> None:
        self.order.append(self.name)
        if self.error is not None:
            raise self.error


def segment(context: Waits) -> object:
    return SimpleNamespace(export=SimpleNamespace(device=UUID), context=context)


@pytest.fixture
def torch_on_card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """A torch that has the card as its second; what was asked of it."""
    asked: list[tuple[str, object]] = []
    for module in (device_order, device_views):
        monkeypatch.setattr(module, "find_torch_device", lambda _uuid: "cuda:1")

    def current_stream(device: str) -> Waits:
        asked.append(("stream", device))
        return Waits([], "")

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("all", device)))
    return asked


def test_the_named_stream_is_waited_for_and_no_other(torch_on_card: list[tuple[str, object]]) -> None:
    order: list[str] = []
    wait_for_stream(segment(Waits(order, "default")), Waits(order, "named"))  # type: ignore[arg-type]
    assert order == ["named"]
    assert torch_on_card == []


def test_torchs_current_stream_on_that_card_is_waited_for(torch_on_card: list[tuple[str, object]]) -> None:
    order: list[str] = []
    wait_for_stream(segment(Waits(order, "default")), None)  # type: ignore[arg-type]
    wait_for_device(segment(Waits(order, "default")))  # type: ignore[arg-type]
    assert order == []
    assert torch_on_card == [("stream", "cuda:1"), ("all", "cuda:1")]


def test_without_torch_on_the_card_the_drivers_own_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_order, "find_torch_device", lambda _uuid: None)
    order: list[str] = []
    wait_for_stream(segment(Waits(order, "default")), None)  # type: ignore[arg-type]
    wait_for_device(segment(Waits(order, "default")))  # type: ignore[arg-type]
    assert order == ["default", "default"]


def test_work_that_failed_is_an_error_before_a_seal_and_a_line_in_the_log_before_a_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_order, "find_torch_device", lambda _uuid: None)
    broken = Waits([], "", RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(CudaDeviceLost, match="device-side assert"):
        wait_for_stream(segment(Waits([], "")), broken)  # type: ignore[arg-type]
    lost = segment(Waits([], "", CudaDeviceLost("off the bus")))
    with pytest.raises(CudaDeviceLost, match="off the bus"):
        wait_for_stream(lost, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        wait_for_device(lost)  # type: ignore[arg-type]
    assert "off the bus" in caplog.text


def test_private_memory_is_torchs_on_the_card_and_kept_by_its_views(
    torch_on_card: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, asked = torch.empty, []

    def on_card(nbytes: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        asked.append(device)
        return empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_card)
    views = private_views("cuda:1", 4096)
    assert isinstance(views, DeviceViews)
    assert asked == ["cuda:1"]
    assert views._live_anchor().owner is views._owner

    def refuse(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OutOfMemory, match="private copy: CUDA out of memory"):
        private_views("cuda:1", 4096)


def test_a_card_that_is_lost_publishes_nothing_and_closes_quietly(tmp_path: Path) -> None:
    with (
        fake_machine(tmp_path) as machine,
        running_daemon(tmp_path, budget="16MiB", segment="4MiB", machine=machine) as daemon,
        kvd_client.connect(daemon.folder) as client,
    ):
        cache = client.cache(model=MODEL, layout=LAYOUT)
        seq = cache.sequence(PROMPT)
        fill(seq, PROMPT)
        machine.lose_card(0)
        with pytest.raises(CudaDeviceLost):
            seq.commit()
        assert seq.num_sealed_tokens == 0
        assert holds(seq, PROMPT, 100)
        seq.close()
        let_go()
        with pytest.raises(CudaDeviceLost):
            cache.sequence(PROMPT, wait_s=0)
        (own,) = client.status().clients
        assert (own.num_references, own.num_reserved) == (0, 0)
