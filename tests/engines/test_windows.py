"""Sliding windows: the whole history is kept and shared, a step sees what the window shows it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvd_client
from kvd_client.engines.transformers import attach, namespace
from tests.engines.tiny import greedy, prompt, windowed_model

FAMILIES = [("gemma3", "sdpa"), ("gemma3", "eager"), ("gemma2", "eager"), ("mistral", "sdpa")]


# case E2
@pytest.mark.parametrize(("family", "attention"), FAMILIES)
@pytest.mark.parametrize("window", [5, 16, 20, 100, 101, 400])
def test_a_window_smaller_than_the_prompt_gives_the_same_tokens(
    client: kvd_client.Client, salt: str, family: str, attention: str, window: int
) -> None:
    model = windowed_model(family, window=window, attention=attention)
    expected = greedy(model, prompt(), 40)
    for num_found in (0, 96):
        with attach(client, model, prompt(), salt=salt) as cache:
            assert cache.num_cached_tokens == num_found
            assert torch.equal(greedy(model, prompt(), 40, cache=cache), expected)
            assert cache.num_copied_bytes == 0


# case E2
@pytest.mark.parametrize(("family", "attention"), FAMILIES)
def test_logits_are_those_of_a_dynamic_cache_with_the_same_split(
    client: kvd_client.Client, salt: str, family: str, attention: str
) -> None:
    model = windowed_model(family, attention=attention)
    with attach(client, model, prompt(), salt=salt) as cache:
        greedy(model, prompt(), 1, cache=cache)
    control = DynamicCache(config=model.config)
    with torch.no_grad(), attach(client, model, prompt(), salt=salt) as cache:
        model(prompt()[:, :96], cache=control)
        steps = [prompt()[:, 96:99], prompt()[:, 99:], *prompt(5, seed=3).T[:, None]]
        for ids in steps:
            assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=control).logits)


# case E2
def test_a_windows_history_can_be_cut_where_transformers_has_forgotten_it(client: kvd_client.Client, salt: str) -> None:
    model = windowed_model("gemma3")
    with attach(client, model, prompt(), salt=salt) as cache:
        greedy(model, prompt(), 30, cache=cache)
        cache.crop(50 - cache.get_seq_length())
        other = torch.cat([prompt()[:, :50], prompt(60, seed=4)], dim=1)
        assert torch.equal(greedy(model, other, 30, cache=cache), greedy(model, other, 30))


# case E2
@pytest.mark.parametrize("chunk", [3, 25])
def test_prefill_in_chunks_over_windows(client: kvd_client.Client, salt: str, chunk: int) -> None:
    model = windowed_model("gemma3")
    with attach(client, model, prompt(), salt=salt) as cache:
        assert torch.equal(greedy(model, prompt(), cache=cache, prefill_chunk_size=chunk), greedy(model, prompt()))


# case A4
def test_another_window_or_another_order_of_layers_is_another_namespace() -> None:
    spaces = {
        namespace(windowed_model("gemma3")),
        namespace(windowed_model("gemma3", window=21)),
        namespace(windowed_model("gemma3", layer_types=["full_attention", "sliding_attention"])),
    }
    assert len(spaces) == 3


# case A4
def test_the_tables_of_both_kinds_of_layers_are_looked_at() -> None:
    edited = windowed_model("gemma3")
    edited.model.rotary_emb.sliding_attention_inv_freq.mul_(0.5)
    assert namespace(edited) != namespace(windowed_model("gemma3"))
