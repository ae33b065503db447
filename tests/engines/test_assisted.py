"""Assisted decoding proposes tokens, and crops those that were wrong: same tokens, nothing wrong published."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import kvd_client
from kvd_client.engines.transformers import attach
from tests.engines.tiny import greedy, prompt, tiny_model, windowed_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def with_repeats() -> torch.Tensor:
    """A prompt in which looking up the last tokens finds something."""
    return torch.cat([prompt(40), prompt(40), prompt(20)], dim=1)


def helpers(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    close = tiny_model()
    with torch.no_grad():
        close.model.layers[0].mlp.up_proj.weight.mul_(1.3)
    return {
        "looking up": {"prompt_lookup_num_tokens": 4},
        "an assistant that is often right": {"assistant_model": close},
        "an assistant that is never right": {"assistant_model": tiny_model(seed=9)},
        "itself": {"assistant_model": tiny_model()},
    }


HELPERS = tuple(helpers(tiny_model()))


# case E2
@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("num_found", [0, 96])
def test_it_gives_the_tokens_of_a_run_without_kvd(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, helper: str, num_found: int
) -> None:
    ids, arguments = with_repeats(), helpers(model)[helper]
    expected = greedy(model, ids, 30)
    if num_found:
        with attach(client, model, ids, salt=salt) as cache:
            greedy(model, ids, 1, cache=cache)
    with attach(client, model, ids, salt=salt) as cache:
        assert cache.num_cached_tokens == num_found
        assert torch.equal(greedy(model, ids, 30, cache=cache, **arguments), expected)
        # What is thrown away was not published before, so throwing it away copies nothing.
        assert cache.num_copied_bytes == 0
        held = cache.get_seq_length()
        assert cache.sequence.token_ids == expected[0, :held].tolist()
    # What stayed is published, under the tokens that stayed.
    with attach(client, model, expected, salt=salt) as cache:
        assert cache.num_cached_tokens == held // 16 * 16
        assert torch.equal(greedy(model, expected, cache=cache), greedy(model, expected))


# case E2
def test_the_cached_part_is_not_computed_again(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    ids = with_repeats()
    with attach(client, model, ids, salt=salt) as cache:
        greedy(model, ids, 1, cache=cache)
    lengths: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with attach(client, model, ids, salt=salt) as cache:
        greedy(model, ids, 10, cache=cache, prompt_lookup_num_tokens=3)
    hook.remove()
    assert lengths[0] <= 100 - 96 + 3


# case E2
def test_only_new_tokens_with_the_whole_mask(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    ids = with_repeats()
    with attach(client, model, ids, salt=salt) as cache:
        first = greedy(model, ids, 5, cache=cache)
        turn = torch.cat([first, prompt(12, seed=6)], dim=1)
        output = greedy(model, turn, 20, cache=cache, prompt_lookup_num_tokens=3)
        assert torch.equal(output, greedy(model, turn, 20))


# case E2
def test_more_new_tokens_than_are_held_are_not_taken_for_the_whole_prompt(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    ids = with_repeats()
    with attach(client, model, ids, salt=salt) as cache:
        greedy(model, ids[:, :20], 1, cache=cache)
        new, mask = ids[:, 20:], torch.ones_like(ids)
        output = greedy(model, new, 20, cache=cache, attention_mask=mask, prompt_lookup_num_tokens=3)
        assert output[0, new.shape[1] :].tolist() == greedy(model, ids, 20)[0, ids.shape[1] :].tolist()


# case E2
def test_it_works_over_windows(client: kvd_client.Client, salt: str) -> None:
    model, ids = windowed_model("gemma3"), with_repeats()
    with attach(client, model, ids, salt=salt) as cache:
        output = greedy(model, ids, 40, cache=cache, prompt_lookup_num_tokens=4)
    assert torch.equal(output, greedy(model, ids, 40))


# case E2
def test_a_greedy_call_afterwards_publishes_step_by_step_again(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    ids = with_repeats()
    with attach(client, model, ids, salt=salt) as cache:
        output = greedy(model, ids, 10, cache=cache, prompt_lookup_num_tokens=3)
        output = greedy(model, output, 40, cache=cache)
        assert cache.sequence.num_sealed_tokens == (output.shape[1] - 1) // 16 * 16


class Collector(BaseStreamer):
    """Keeps what is streamed, and says when the first new token is there."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = threading.Event()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended.set()


# case E2
@pytest.mark.parametrize("arguments", [{}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "assisted"])
def test_tokens_are_streamed_from_a_thread(
    client: kvd_client.Client, model: PreTrainedModel, salt: str, arguments: dict[str, Any]
) -> None:
    ids, streamer = with_repeats(), Collector()
    expected = greedy(model, ids, 20)
    with attach(client, model, ids, salt=salt) as cache:
        thread = threading.Thread(
            target=greedy, args=(model, ids, 20), kwargs={"cache": cache, "streamer": streamer, **arguments}
        )
        thread.start()
        assert streamer.ended.wait(60)
        thread.join()
    assert streamer.tokens == expected[0].tolist()
