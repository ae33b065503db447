"""Sequences in two parts, as a device pool lays them out: the shared run here, the private tail there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

import kvd_client
from kvd_client.engines.transformers import KvdCache, attach, namespace
from kvd_client.engines.transformers.guard import GuardedModel
from kvd_client.engines.transformers.row_attention import NAME_BY_IMPLEMENTATION, RowParts, RowStates
from kvd_client.engines.transformers.split_attention import attend
from kvd_client.sequence import Sequence
from tests.engines.tiny import batch, greedy, prompt, tiny_model, windowed_model


class TwoParts:
    """A sequence of which `parts` shows the cached run in memory of its own; no single tensor shows all of it."""

    def __init__(self, inner: Sequence, cut: int | None = None) -> None:
        self._inner = inner
        self._cut = inner.num_cached_tokens if cut is None else cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def layer(self, layer: int) -> Any:
        raise AssertionError("one tensor was asked for, where there are two")

    def parts(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = self._inner.layer(layer)
        shared = keys[:, : self._cut].clone(), values[:, : self._cut].clone()
        tail = keys[:, self._cut :], values[:, self._cut :]
        return [part for part in (shared, tail) if part[0].shape[1]] or [tail]

    def fork(self) -> TwoParts:
        return TwoParts(self._inner.fork(), self._cut)


def attach_two(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, *prompts: torch.Tensor, paddings: Any = None
) -> KvdCache:
    space = namespace(model, salt=salt)
    fields = ("model", "layout", "engine", "positional", "adapter", "salt")
    cache = client.cache(**{name: getattr(space, name) for name in fields})
    sequences = [TwoParts(cache.sequence(ids, wait_s=0.0)) for ids in prompts]
    return KvdCache(sequences, GuardedModel(model), paddings=paddings)  # type: ignore[arg-type]


def warm(client: kvd_client.Client, model: PreTrainedModel, salt: str, *prompts: torch.Tensor) -> None:
    for ids in prompts:
        with attach(client, model, ids, salt=salt) as cache:
            greedy(model, ids, 1, cache=cache)


MODELS = {
    "llama, sdpa": tiny_model,
    "llama, eager": lambda: tiny_model(attention="eager"),
    "llama, a head each": lambda: tiny_model(num_key_value_heads=4),
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen3": lambda: tiny_model("qwen3"),
    "gemma3": lambda: windowed_model("gemma3"),
    "gemma2 with its bound on scores": lambda: windowed_model("gemma2"),
    "mistral": lambda: windowed_model("mistral", window=50),
}


# case E1
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "arguments", [{}, {"prefill_chunk_size": 2}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}]
)
def test_two_parts_give_the_tokens_of_one(
    client: kvd_client.Client, salt: str, kind: str, arguments: dict[str, Any]
) -> None:
    model = MODELS[kind]()
    implementation = model.config._attn_implementation
    warm(client, model, salt, prompt())
    expected = greedy(model, prompt(), 30, **arguments)
    with attach_two(client, model, salt, prompt()) as cache:
        assert cache.num_cached_tokens == 96
        assert torch.equal(greedy(model, prompt(), 30, cache=cache, **arguments), expected)
        assert model.config._attn_implementation == f"kvd_{implementation}"
        # Whoever else uses the model meanwhile computes as before.
        assert torch.equal(greedy(model, prompt(), 30, **arguments), expected)
    assert model.config._attn_implementation == implementation


# case E1
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_one_tensor(client: kvd_client.Client, salt: str, kind: str) -> None:
    model = MODELS[kind]()
    warm(client, model, salt, prompt())
    control = DynamicCache(config=model.config)
    with torch.no_grad(), attach_two(client, model, salt, prompt()) as cache:
        model(prompt()[:, :96], cache=control)
        for ids in (prompt()[:, 96:], *prompt(5, seed=3).T[:, None]):
            found, expected = model(ids, cache=cache).logits, model(ids, cache=control).logits
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_padded_batch_of_two_parts(client: kvd_client.Client, salt: str) -> None:
    model = windowed_model("gemma3")
    prompts = prompt(40, seed=2), prompt(), prompt(10, seed=3)
    inputs = batch(*prompts)
    warm(client, model, salt, *prompts[:2])
    expected = greedy(model, inputs["input_ids"], 30, attention_mask=inputs["attention_mask"])
    with attach_two(client, model, salt, *prompts, paddings=[60, 0, 90]) as cache:
        found = greedy(model, inputs["input_ids"], 30, attention_mask=inputs["attention_mask"], cache=cache)
        assert torch.equal(found, expected)


def test_weights_are_returned_where_they_are_asked_for(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model(attention="eager")
    warm(client, model, salt, prompt())
    control = DynamicCache(config=model.config)
    with torch.no_grad(), attach_two(client, model, salt, prompt()) as cache:
        model(prompt()[:, :96], cache=control)
        found = model(prompt()[:, 96:], cache=cache, output_attentions=True).attentions
        expected = model(prompt()[:, 96:], cache=control, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


TRIANGLE = torch.ones(5, 12, dtype=torch.bool).tril(7)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "a scaling": ({"scaling": 0.7}, {"scaling": 0.7}),
    "that it is not causal": ({"is_causal": False}, {"is_causal": False}),
    "that it is causal": ({"is_causal": True}, {"is_causal": True}),
    "a bound on scores": ({"softcap": 0.5}, {"softcap": 0.5}),
    "a mask": ({"attention_mask": TRIANGLE.triu(3)[None, None]}, {"mask": TRIANGLE.triu(3)}),
}
"""What a model says of its attention -> what `attend` must be told."""


def random_states(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# case E1
@pytest.mark.parametrize("name", NAME_BY_IMPLEMENTATION.values())
@pytest.mark.parametrize("module_is_causal", [True, False, None])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_model_says_of_its_attention_holds_for_two_parts(
    name: str, module_is_causal: bool | None, call: str
) -> None:
    query, keys, values = (random_states(2, 4, 12, 16, seed=seed) for seed in (1, 2, 3))
    query = query[:, :, :5]
    rows = [
        RowParts([(k[:, :7], v[:, :7]), (k[:, 7:], v[:, 7:])], first_query=0, first_column=0)
        for k, v in zip(keys, values, strict=True)
    ]
    module = torch.nn.Module()
    if module_is_causal is not None:
        module.is_causal = module_is_causal
    given, told = CALLS[call]
    states = RowStates(rows)
    function, arguments = AttentionInterface()[name], {"attention_mask": None, "output_attentions": True} | given
    output, weights = function(module, query, states, states, **arguments)
    expected = [
        attend(each, [(k, v)], **({"scaling": 0.25, "is_causal": module_is_causal is not False} | told))
        for each, k, v in zip(query, keys, values, strict=True)
    ]
    torch.testing.assert_close(output, torch.stack([each.transpose(0, 1) for each, _ in expected]))
    assert weights is None, "transformers has one tensor of them for all rows, and there is none"
    _, weights = function(module, query[:1], RowStates(rows[:1]), RowStates(rows[:1]), **arguments)
    assert (weights is not None) == (name == "kvd_eager")


# case E1
def test_a_scaling_of_the_models_own_holds_for_two_parts(client: kvd_client.Client, salt: str) -> None:
    model = windowed_model("gemma2", query_pre_attn_scalar=1)
    warm(client, model, salt, prompt())
    with attach_two(client, model, salt, prompt()) as cache:
        assert torch.equal(greedy(model, prompt(), 30, cache=cache), greedy(model, prompt(), 30))


def test_one_part_is_one_tensor_and_nothing_is_switched(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    warm(client, model, salt, prompt())
    with attach(client, model, prompt(), salt=salt) as cache:
        greedy(model, prompt(), cache=cache)
        assert model.config._attn_implementation == "sdpa"
