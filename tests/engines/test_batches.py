"""Batches: every row a sequence of its own, padding on the left, and the tokens of a run without kvd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel

import kvd_client
from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, SequenceTooLong
from kvd_client.engines.transformers import attach
from kvd_client.engines.transformers.row_attention import NAME_BY_IMPLEMENTATION, RowParts, RowStates
from tests.engines.tiny import batch, greedy, prompt, tiny_model, windowed_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], num_new: int = 8, **arguments: Any
) -> torch.Tensor:
    return greedy(model, inputs["input_ids"], num_new, attention_mask=inputs["attention_mask"], **arguments)


def warm(client: kvd_client.Client, model: PreTrainedModel, salt: str, *prompts: torch.Tensor) -> None:
    for ids in prompts:
        with attach(client, model, ids, salt=salt) as cache:
            greedy(model, ids, 1, cache=cache)


MIXES = {
    "one length": (prompt(100), prompt(100, seed=2)),
    "three lengths": (prompt(40, seed=2), prompt(100), prompt(77, seed=3)),
    "a common beginning": (prompt(100), torch.cat([prompt(100)[:, :64], prompt(20, seed=4)], dim=1)),
    "one row": (prompt(50),),
    "a single token": (prompt(1, seed=5), prompt(40)),
}


# case E2
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_warm", [0, 1, 3])
def test_a_batch_gives_the_tokens_of_a_run_without_kvd(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, mix: str, num_warm: int
) -> None:
    """Cold, with one row found, with all of them found: prefixes of several lengths, some rows go on earlier."""
    inputs = batch(*MIXES[mix])
    warm(client, model, salt, *MIXES[mix][:num_warm])
    expected = generate(model, inputs)
    with attach(client, model, **inputs, salt=salt) as cache:
        if num_warm:
            assert cache.num_cached_tokens >= (MIXES[mix][0].shape[1] - 1) // 16 * 16
        assert torch.equal(generate(model, inputs, cache=cache), expected)
        assert cache.num_copied_bytes == 0
        for row, ids in zip(cache.rows, MIXES[mix], strict=True):
            assert row.num_tokens == ids.shape[1] + 7
            assert row.token_ids[: ids.shape[1]] == ids[0].tolist()


# case E2
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_families_and_attentions(client: kvd_client.Client, salt: str, family: str, attention: str) -> None:
    model = tiny_model(family, attention=attention)
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    warm(client, model, salt, prompts[1])
    with attach(client, model, **inputs, salt=salt) as cache:
        assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))
    assert model.config._attn_implementation == attention


# case E2
def test_what_a_batch_computes_is_found_by_each_prompt_alone(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    with attach(client, model, **inputs, salt=salt) as cache:
        generate(model, inputs, 20, cache=cache)
    for ids in prompts:
        with attach(client, model, ids, salt=salt) as cache:
            assert cache.num_cached_tokens == (ids.shape[1] - 1) // 16 * 16
            assert torch.equal(greedy(model, ids, cache=cache), greedy(model, ids))


# case E2
@pytest.mark.parametrize("chunk", [3, 30, 200])
def test_a_batch_is_prefilled_in_chunks(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, chunk: int
) -> None:
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    warm(client, model, salt, prompts[0])
    with attach(client, model, **inputs, salt=salt) as cache:
        assert torch.equal(generate(model, inputs, cache=cache, prefill_chunk_size=chunk), generate(model, inputs))


# case E2
@pytest.mark.parametrize("family", ["gemma3", "gemma2", "mistral"])
def test_windows_and_padding_together(client: kvd_client.Client, salt: str, family: str) -> None:
    model = windowed_model(family)
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    warm(client, model, salt, prompts[0], prompts[1])
    with attach(client, model, **inputs, salt=salt) as cache:
        assert cache.num_cached_tokens >= 32 + 96
        assert torch.equal(generate(model, inputs, 30, cache=cache), generate(model, inputs, 30))


def test_a_batch_goes_on_with_the_next_turn(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    inputs = batch(*MIXES["three lengths"])
    with attach(client, model, **inputs, salt=salt) as cache:
        output = generate(model, inputs, cache=cache)
        more = torch.cat([prompt(9, seed=number) for number in range(3)])
        ids = torch.cat([output, more], dim=1)
        grown = ids.shape[1] - inputs["input_ids"].shape[1]
        turn = {
            "input_ids": ids,
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(3, grown, dtype=torch.long)], dim=1),
        }
        assert torch.equal(generate(model, turn, cache=cache), generate(model, turn))


def test_rows_can_be_chosen_repeated_and_cropped(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    with attach(client, model, **inputs, salt=salt) as cache:
        generate(model, inputs, cache=cache)
        cache.crop(-10)
        left_out = cache.rows[1]
        cache.batch_select_indices(torch.tensor([2, 0]))
        assert left_out.is_closed
        cache.batch_repeat_interleave(2)
        chosen = {name: tensor[[2, 2, 0, 0]] for name, tensor in inputs.items()}
        assert cache.batch_size == 4
        assert torch.equal(generate(model, chosen, cache=cache), generate(model, chosen))


def test_padding_makes_no_other_prompt(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    """What is padded in one batch and not in another is found all the same."""
    ids = prompt(50)
    padded = batch(ids, prompt(70, seed=2))
    one_row = {name: tensor[:1] for name, tensor in padded.items()}
    warm(client, model, salt, ids)
    with attach(client, model, **one_row, salt=salt) as cache:
        assert cache.num_cached_tokens == 48
        assert torch.equal(generate(model, one_row, cache=cache), generate(model, one_row))


def test_the_mask_is_learned_by_an_empty_cache(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    inputs = batch(*MIXES["three lengths"])
    with attach(client, model, **inputs, salt=salt) as cache:
        generate(model, inputs, cache=cache)
        cache.reset()
        other = batch(prompt(30, seed=7), prompt(20, seed=8), prompt(33, seed=9))
        assert torch.equal(generate(model, other, cache=cache), generate(model, other))


# case E2
def test_a_refused_first_step_leaves_an_empty_cache_without_padding(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    padded = {name: tensor[:1] for name, tensor in batch(prompt(20, seed=7), prompt(30)).items()}
    with attach(client, model, prompt(30), salt=salt, max_tokens=40) as cache:
        cache.reset()
        with torch.no_grad(), pytest.raises(InvalidRequest, match="position_ids"):
            model(**padded, cache=cache)
        assert cache.get_max_length() == 40
        with pytest.raises(SequenceTooLong):
            greedy(model, prompt(35), cache=cache)
        assert cache.num_columns == 0, "refused before anything was computed"
        assert torch.equal(generate(model, padded, cache=cache), generate(model, padded))


def test_padding_takes_no_room_of_an_empty_cache(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    inputs = {name: tensor[:1] for name, tensor in batch(prompt(20, seed=7), prompt(60)).items()}
    with attach(client, model, prompt(20), salt=salt, max_tokens=30) as cache:
        cache.reset()
        assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))


# case E2
@pytest.mark.parametrize("wrong", ["none", "other padding", "a hole", "padding on the right", "fewer rows"])
def test_another_mask_is_refused_before_anything_is_written(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, wrong: str
) -> None:
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    mask = inputs["attention_mask"].clone()
    if wrong == "other padding":
        mask[0, :70] = 0
    elif wrong == "a hole":
        mask[1, 40] = 0
    elif wrong == "padding on the right":
        mask[1, -3:] = 0
    elif wrong == "fewer rows":
        mask = mask[:2]
    with attach(client, model, **inputs, salt=salt) as cache:
        with torch.no_grad(), pytest.raises(InvalidRequest, match="mask"):
            model(inputs["input_ids"], attention_mask=None if wrong == "none" else mask, cache=cache)
        assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))
    if wrong in {"a hole", "padding on the right", "fewer rows"}:
        with pytest.raises(InvalidRequest, match="mask"):
            attach(client, model, inputs["input_ids"], attention_mask=mask, salt=salt)


# case E2
def test_padding_without_positions_is_refused(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    """The model would count columns, and put the keys of a padded row where no other process looks for them."""
    inputs = batch(*MIXES["three lengths"])
    with attach(client, model, **inputs, salt=salt) as cache:
        with torch.no_grad(), pytest.raises(InvalidRequest, match="position_ids"):
            model(**inputs, cache=cache)
        assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))


# case A8
def test_one_row_with_other_tokens_refuses_the_batch(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    prompts = MIXES["three lengths"]
    inputs = batch(*prompts)
    warm(client, model, salt, *prompts)
    wrong = {"input_ids": inputs["input_ids"].clone(), "attention_mask": inputs["attention_mask"]}
    wrong["input_ids"][2, 30] = wrong["input_ids"][2, 30] % 127 + 1
    with attach(client, model, **inputs, salt=salt) as cache:
        with pytest.raises(InvalidRequest, match="only the first 7 are the prompt's"):
            generate(model, wrong, cache=cache)
        with pytest.raises(EngineUnsupported, match="3 sequences"):
            greedy(model, prompts[1], cache=cache)
        assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))


# case A8
def test_a_row_that_holds_more_than_it_is_given_is_refused_before_anything_is_computed(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    inputs = batch(prompt(40, seed=2), prompt(100))
    warm(client, model, salt, prompt(100))
    with attach(client, model, **inputs, salt=salt) as cache:
        held = cache.num_columns
        with pytest.raises(InvalidRequest, match="only the first 70 are the prompt's"):
            generate(model, {name: tensor[:, :70] for name, tensor in inputs.items()}, cache=cache)
        assert cache.num_columns == held
        assert torch.equal(generate(model, inputs, cache=cache), generate(model, inputs))


# case E2
@pytest.mark.parametrize("mask", ["of four dimensions", "no tensor"])
def test_a_custom_mask_is_refused_at_once(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, mask: str
) -> None:
    inputs = batch(prompt(20), prompt(30))
    custom: Any = inputs["attention_mask"][:, None, None]
    with pytest.raises(EngineUnsupported, match="2D mask"):
        attach(
            client,
            model,
            inputs["input_ids"],
            attention_mask=custom if mask == "of four dimensions" else custom.tolist(),
            salt=salt,
        )


def test_padding_takes_no_room(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    """The last token of all is not computed, so it takes none either."""
    inputs = {name: tensor[:1] for name, tensor in batch(prompt(40), prompt(100)).items()}
    with attach(client, model, **inputs, salt=salt, max_tokens=45) as cache:
        assert cache.get_max_length() == 60 + 45
        with pytest.raises(SequenceTooLong, match="max_tokens=47"):
            generate(model, inputs, 7, cache=cache)
        assert torch.equal(generate(model, inputs, 6, cache=cache), generate(model, inputs, 6))


def test_what_needs_one_sequence_is_refused_for_several(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    inputs = batch(*MIXES["three lengths"])
    with attach(client, model, **inputs, salt=salt, max_tokens=120) as cache:
        assert cache.get_max_length() == 120, "of the row without padding"
        with pytest.raises(InvalidRequest, match="3 sequences"):
            _ = cache.sequence
        with pytest.raises(InvalidRequest, match="3 sequences"):
            cache.align(prompt())
        for look in (lambda layer: layer.keys, lambda layer: layer.values):
            with pytest.raises(EngineUnsupported, match="several tensors"):
                look(cache.layers[0])


def test_a_batch_with_a_closed_row_says_so(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    inputs = batch(*MIXES["three lengths"])
    with attach(client, model, **inputs, salt=salt) as cache:
        cache.rows[2].close()
        with pytest.raises(ClientClosed, match="KvdCache was closed"):
            generate(model, inputs, cache=cache)


def test_a_reset_forgets_what_a_row_had_found_beyond_the_others(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    inputs = batch(prompt(100, seed=2), prompt(100))
    warm(client, model, salt, prompt(100))
    with attach(client, model, **inputs, salt=salt) as cache:
        assert (cache.num_columns, cache.num_cached_tokens) == (0, 96)
        cache.reset()
        other = batch(prompt(30, seed=7), prompt(20, seed=8))
        assert torch.equal(generate(model, other, cache=cache), generate(model, other))


def test_a_fork_goes_on_where_its_batch_was(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    """Though its only row has found more than the columns of the batch, which began with a row that had nothing."""
    inputs = batch(prompt(100, seed=2), prompt(100))
    warm(client, model, salt, prompt(100))
    one_row = {name: tensor[1:] for name, tensor in inputs.items()}
    with attach(client, model, **inputs, salt=salt) as cache:
        cache.batch_select_indices(torch.tensor([1]))
        with cache.fork() as fork:
            assert (fork.num_columns, fork.rows[0].num_tokens) == (0, 96)
            assert torch.equal(generate(model, one_row, cache=fork), generate(model, one_row))


class OwnAttention(torch.nn.Module):
    """An attention that takes keys and values into its own hands, as older model files do."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.layer_idx = inner.layer_idx

    def forward(self, hidden_states: torch.Tensor, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:2], -1, 16)
        queries = self.inner.k_proj(hidden_states).view(shape).transpose(1, 2)
        keys, _ = cache.update(queries, queries, self.layer_idx)
        mixed = torch.matmul(torch.matmul(queries, keys.transpose(2, 3)).softmax(-1), keys)
        return mixed.transpose(1, 2).flatten(2).repeat(1, 1, 2), None


def test_a_model_with_its_own_attention_is_refused_for_batches(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)
    inputs = batch(prompt(20), prompt(30))
    with attach(client, model, **inputs, salt=salt) as cache, pytest.raises(EngineUnsupported, match="by itself"):
        generate(model, inputs, cache=cache)


def test_a_model_with_another_attention_function_is_refused_for_batches(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    inputs = batch(prompt(20), prompt(30))
    with attach(client, model, **inputs, salt=salt) as cache:
        model.config._attn_implementation_internal = "flex_attention"
        with pytest.raises(EngineUnsupported, match="flex_attention"):
            generate(model, inputs, cache=cache)


def test_an_attention_function_chosen_meanwhile_stays(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    inputs = batch(prompt(20), prompt(30))
    with attach(client, model, **inputs, salt=salt) as cache:
        generate(model, inputs, cache=cache)
        model.config._attn_implementation_internal = "eager"
    assert model.config._attn_implementation == "eager"


ATTENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "other values than the cache's": ("by itself", {"value": torch.zeros(1, 2, 4, 16)}),
    "more rows than the cache has": ("by itself", {"query": torch.zeros(2, 4, 1, 16)}),
    "a mask of its own": ("2D mask", {"attention_mask": torch.ones(1, 8)}),
    "sinks over two parts": ("s_aux over a sequence in two parts", {"s_aux": torch.zeros(4)}),
}


# case E2
@pytest.mark.parametrize("call", ATTENDS)
@pytest.mark.parametrize("name", NAME_BY_IMPLEMENTATION.values())
def test_an_attention_over_rows_that_would_be_wrong_is_refused(name: str, call: str) -> None:
    says, arguments = ATTENDS[call]
    part = torch.zeros(2, 4, 16), torch.zeros(2, 4, 16)
    states = RowStates([RowParts([part, part], first_query=0, first_column=0)])
    right = {"query": torch.zeros(1, 4, 1, 16), "key": states, "value": states, "attention_mask": None}
    attend = AttentionInterface()[name]
    output, _ = attend(torch.nn.Module(), **right)
    assert output.shape == (1, 1, 4, 16)
    with pytest.raises(EngineUnsupported, match=says):
        attend(torch.nn.Module(), **(right | arguments))
