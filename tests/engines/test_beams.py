"""Several continuations of one prompt: rows are forked, the prompt's blocks are there once, the tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import kvd_client
from kvd.cli.demo.daemon import private_daemon
from kvd_client.engines.transformers import attach
from tests.engines.tiny import batch, greedy, prompt, tiny_model, windowed_model

SAMPLING: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.5}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def sampled(model: PreTrainedModel, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(ids, **(SAMPLING | arguments))


# case E3
@pytest.mark.parametrize("num_found", [0, 96])
@pytest.mark.parametrize(("num_beams", "num_kept"), [(2, 1), (4, 4), (3, 2)])
def test_beams_give_the_tokens_of_a_run_without_kvd(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, num_found: int, num_beams: int, num_kept: int
) -> None:
    beams = {"num_beams": num_beams, "num_return_sequences": num_kept}
    if num_found:
        with attach(client, model, prompt(), salt=salt) as cache:
            greedy(model, prompt(), 1, cache=cache)
    with attach(client, model, prompt(), salt=salt) as cache:
        assert cache.num_cached_tokens == num_found
        assert torch.equal(greedy(model, prompt(), 30, cache=cache, **beams), greedy(model, prompt(), 30, **beams))
        # The caller's own cache is what it was, so the next call over it is right as well.
        assert (cache.batch_size, cache.get_seq_length()) == (1, num_found)
        assert torch.equal(greedy(model, prompt(), cache=cache), greedy(model, prompt()))
    assert not model.get_decoder()._forward_hooks, "the fork for the beams took its checks off, too"


# case E3
@pytest.mark.parametrize("do_sample", [False, True])
def test_beams_of_a_padded_batch(client: kvd_client.Client, model: PreTrainedModel, salt: str, do_sample: bool) -> None:
    inputs = batch(prompt(30), prompt(50, seed=2))
    arguments: dict[str, Any] = {"max_new_tokens": 20, "num_beams": 3, "do_sample": do_sample}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **arguments)
    with attach(client, model, **inputs, salt=salt) as cache:
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs, **arguments, cache=cache), expected)


# case E3
def test_beams_over_windows(client: kvd_client.Client, salt: str) -> None:
    model = windowed_model("gemma3")
    with attach(client, model, prompt(), salt=salt) as cache:
        found = greedy(model, prompt(), 30, cache=cache, num_beams=3)
    assert torch.equal(found, greedy(model, prompt(), 30, num_beams=3))


# case E3
@pytest.mark.parametrize("where", ["arguments", "configuration", "the model's own configuration"])
def test_several_sampled_sequences(client: kvd_client.Client, salt: str, where: str) -> None:
    model = tiny_model()
    expected = sampled(model, prompt(), num_return_sequences=4)
    arguments: dict[str, Any] = {"num_return_sequences": 4}
    if where == "configuration":
        arguments = {"generation_config": GenerationConfig(**SAMPLING, num_return_sequences=4, pad_token_id=0)}
    elif where == "the model's own configuration":
        model.generation_config.num_return_sequences = 4
        model.generation_config.do_sample = True
        arguments = {}
    with attach(client, model, prompt(), salt=salt) as cache:
        assert torch.equal(sampled(model, prompt(), **arguments, cache=cache), expected)


# case E3
def test_rows_repeated_by_the_caller_serve_as_well(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    inputs = batch(prompt(30), prompt(50, seed=2))
    arguments = {"num_beams": 3, "attention_mask": inputs["attention_mask"]}
    with attach(client, model, **inputs, salt=salt) as cache:
        greedy(model, inputs["input_ids"], 1, cache=cache, attention_mask=inputs["attention_mask"])
    with attach(client, model, **inputs, salt=salt) as cache:
        assert cache.num_columns > 0
        cache.batch_repeat_interleave(3)
        found = greedy(model, inputs["input_ids"], 20, cache=cache, **arguments)
    assert torch.equal(found, greedy(model, inputs["input_ids"], 20, **arguments))


# case E3
def test_the_prompts_blocks_are_there_once(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    """Copy-on-write: each of five rows owns its last, partial block and what it has reserved, and shares six."""
    with attach(client, model, prompt(), salt=salt) as cache:
        greedy(model, prompt(), 1, cache=cache)
        with cache.repeated(5) as rows:
            layout = cache.sequence.layout
            assert rows.num_copied_bytes == 5 * (100 - 96) * layout.token_nbytes
            first = rows.rows[0].parts(0)[0][0]
            assert all(torch.equal(row.parts(0)[0][0], first) for row in rows.rows)
            me = next(each for each in client.status().clients if each.session == client.session_id)
            assert me.num_references == 6 * 6  # of six blocks, by six sequences
            pool = next(each for each in client.status().pools if each.block_nbytes == layout.block_nbytes)
            assert pool.num_referenced == 6


# case E3
def test_the_cache_that_comes_back_holds_the_beams(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    with attach(client, model, prompt(), salt=salt) as cache:
        result = greedy(model, prompt(), cache=cache, num_beams=2, return_dict_in_generate=True)
        assert result.cache.batch_size == 2
        assert result.cache.get_seq_length() == 107
        result.cache.close()


# case E3
def test_a_pool_too_small_for_the_beams_still_gives_the_right_ones(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """What finds no room in the pool goes on in private memory."""
    with (
        private_daemon("--memory-budget", "128KiB", "--memory-segment", "64KiB") as daemon,
        kvd_client.connect(daemon.runtime_dir) as client,
        attach(client, model, prompt()) as cache,
    ):
        found = greedy(model, prompt(), 40, cache=cache, num_beams=4)
        assert torch.equal(found, greedy(model, prompt(), 40, num_beams=4))
        assert "goes on in private memory" in caplog.text
        assert torch.equal(greedy(model, prompt(), 40, cache=cache), greedy(model, prompt(), 40))
