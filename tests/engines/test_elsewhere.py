"""A model that is not where the daemon's pool is: its cache is a copy on the model's device, or mapped host memory."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvd_client
from kvd.errors import EngineUnsupported
from kvd_client.engines.transformers import attach, shared
from kvd_client.engines.transformers.support import layout_of, require_shape, require_supported
from kvd_client.memory import laying_out
from kvd_client.memory.compute_device import is_elsewhere
from kvd_client.session import opened_cache
from tests.client.homes import fake_machine, let_go
from tests.engines.test_two_processes import in_another_process
from tests.engines.tiny import batch, greedy, prompt, tiny_model
from tests.support.daemon import running_daemon


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is not where a model computes, not even one on the CPU."""
    monkeypatch.setattr(laying_out, "is_elsewhere", lambda computes_on, _shown: bool(computes_on))


# case E1
def test_tokens_over_a_copy_are_those_without_kvd_and_other_processes_find_them(
    runtime_dir: Path, client: kvd_client.Client, tmp_path: Path, salt: str, elsewhere: None
) -> None:
    model, ids = tiny_model(), prompt(100)
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval()
    uncached = greedy(loaded, ids, 12)
    with attach(client, loaded, ids, salt=salt) as cache:
        assert cache.num_copied_bytes == 0
        assert torch.equal(greedy(loaded, ids, 12, cache=cache), uncached)
    # Mapped by the other process, and its own tokens copied by us.
    other = torch.cat([uncached, prompt(40, seed=7)], dim=1)
    told = in_another_process(runtime_dir, str(tmp_path / "model"), salt, other)
    assert (told["num_cached"], told["num_copied"]) == (96, 0)
    assert told["tokens"] == greedy(loaded, other, 12)[0].tolist()
    with attach(client, loaded, other, salt=salt) as cache:
        assert cache.num_cached_tokens == 144
        assert cache.num_copied_bytes == 144 * layout_of(loaded).token_nbytes
        assert torch.equal(greedy(loaded, other, 12, cache=cache), greedy(loaded, other, 12))


def test_long_generations_batches_beams_and_crops_over_copies(
    client: kvd_client.Client, salt: str, elsewhere: None
) -> None:
    model, ids = tiny_model(), prompt(100)
    with attach(client, model, ids, salt=salt, max_tokens=400) as cache:
        output = greedy(model, ids, 200, cache=cache)
        assert torch.equal(output, greedy(model, ids, 200))
        assert cache.align(ids) == 99
        assert torch.equal(greedy(model, ids, 20, cache=cache), output[:, :120])
    with attach(client, model, ids, salt=salt) as cache:
        assert torch.equal(greedy(model, ids, 12, cache=cache, num_beams=3), greedy(model, ids, 12, num_beams=3))
    rows = batch(ids, prompt(60, seed=5))
    with attach(client, model, **rows, salt=salt) as cache:
        assert cache.num_copied_bytes > 0
        assert torch.equal(greedy(model, cache=cache, num_new=8, **rows), greedy(model, num_new=8, **rows))


def test_a_model_on_the_cpu_shares_with_a_pool_on_a_card_that_torch_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the fake card torch's CPU shows the memory; as a real card's, it would be on cuda:0."""
    monkeypatch.setattr(opened_cache, "shown_on", lambda _uuid: "cuda:0")
    monkeypatch.setattr(opened_cache, "_told", set())
    model, ids = tiny_model(), prompt(70)
    uncached = greedy(model, ids, 12)
    with (
        fake_machine(tmp_path) as machine,
        running_daemon(tmp_path, budget="64MiB", segment="4MiB", machine=machine) as daemon,
        kvd_client.connect(daemon.folder) as client,
        caplog.at_level(logging.WARNING),
    ):
        for num_cached in (0, 64):
            with attach(client, model, ids, wait_s=10) as cache:
                assert cache.num_cached_tokens == num_cached
                assert torch.equal(greedy(model, ids, 12, cache=cache), uncached)
        with shared(model, client) as statistics:
            assert torch.equal(greedy(model, ids, 12), uncached)
        assert (statistics.num_served, statistics.num_cached_tokens) == (1, 64)
        (me,) = client.status().clients
        assert [one.mode for one in me.maps] == ["staged"]
        del cache
        let_go()
    told = [message for message in caplog.messages if "host memory" in message]
    assert len(told) == 1
    assert told[0].endswith("are used through host memory: they are attended over on cpu")


def test_a_model_over_two_cards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    buffers = [SimpleNamespace(device=torch.device("cuda:0")), SimpleNamespace(device=torch.device("cuda:1"))]
    monkeypatch.setattr(model, "parameters", lambda: iter(buffers))
    monkeypatch.setattr(type(model), "dtype", torch.float32)
    monkeypatch.setattr(model, "buffers", lambda: iter(()))
    with pytest.raises(EngineUnsupported, match="is on cuda:0, cuda:1: all of it must be on one device"):
        require_supported(model)


def test_keys_from_another_card_are_refused() -> None:
    layout = layout_of(tiny_model())

    def states(device: str) -> Any:
        shape = (1, layout.num_kv_heads, 5, layout.head_dim)
        return SimpleNamespace(shape=shape, dtype=torch.float32, device=torch.device(device), requires_grad=False)

    require_shape(layout, states("cuda:1"), states("cuda:1"), num_rows=1, device=torch.device("cuda:1"))
    with pytest.raises(EngineUnsupported, match="float32 on cuda:1, the cache holds float32 on cuda:0"):
        require_shape(layout, states("cuda:1"), states("cuda:1"), num_rows=1, device=torch.device("cuda:0"))


def test_the_choice_is_by_the_models_device(client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `attach` says of a model on a second card, to a daemon in host memory."""
    asked: list[tuple[str, str | None]] = []

    def noted(computes_on: str, shown: str | None) -> bool:
        asked.append((computes_on, shown))
        return is_elsewhere(computes_on, shown)

    model = tiny_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    monkeypatch.setattr(laying_out, "is_elsewhere", noted)
    with pytest.raises(EngineUnsupported, match="sequence is to be on cuda:1"):
        attach(client, model, prompt())
    assert asked == [("cuda:1", "cpu")]
