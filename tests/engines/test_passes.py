"""What a forward pass may do to a cache, whoever computes: all of its step, once, in every layer; or a typed error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvd_client
from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, SequenceTooLong
from kvd_client.engines.transformers import KvdCache, attach
from tests.engines.tiny import batch, greedy, prompt, tiny_model

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def cache(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> Iterator[KvdCache]:
    """Of `prompt()`, nothing computed yet."""
    with attach(client, model, prompt(), salt=salt) as cache:
        yield cache


@contextmanager
def before_layer(model: PreTrainedModel, index: int, call: Callable[[], Any]) -> Iterator[None]:
    """Within it `call` comes in every forward pass before that layer."""
    hook = model.model.layers[index].register_forward_pre_hook(lambda *_: call() and None)
    try:
        yield
    finally:
        hook.remove()


def states(num_heads: int = 2, num_tokens: int = 4, head_dim: int = 16, **options: Any) -> torch.Tensor:
    return torch.zeros(1, num_heads, num_tokens, head_dim, **options)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """As `generate` makes them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


WRITES: dict[str, tuple[str, int, torch.Tensor, torch.Tensor]] = {
    "a layer twice": ("wrote twice", 0, states(), states()),
    "other tokens": ("other tokens than the pass was given", 1, states(num_tokens=3), states(num_tokens=3)),
    "rows": ("a batch of 2 rows", 1, states().repeat(2, 1, 1, 1), states().repeat(2, 1, 1, 1)),
    "heads": ("keys have shape", 1, states(num_heads=4), states(num_heads=4)),
    "sizes of heads": ("values have shape", 1, states(), states(head_dim=8)),
    "fewer values than keys": ("values have shape", 1, states(), states(num_tokens=3)),
    "another dtype": ("float16", 1, states(dtype=torch.float16), states(dtype=torch.float16)),
    "values of another dtype": ("values are torch.float16", 1, states(), states(dtype=torch.float16)),
    "another device": ("meta", 1, states(device="meta"), states(device="meta")),
    "keys with gradients": ("gradients", 1, states(requires_grad=True), states()),
    "values with gradients": ("gradients", 1, states(), states(requires_grad=True)),
}


# case E2
@pytest.mark.parametrize("write", WRITES)
def test_what_is_not_the_steps_own_is_not_written(cache: KvdCache, model: PreTrainedModel, write: str) -> None:
    says, index, keys, values = WRITES[write]
    model(prompt()[:, :20], cache=cache)
    with (
        before_layer(model, 1, lambda: cache.update(keys, values, index)),
        pytest.raises(EngineUnsupported, match=says),
    ):
        model(prompt()[:, 20:24], cache=cache)
    assert cache.rows[0].num_tokens_in(1) == 20


# case E2
def test_a_layer_that_is_left_out_is_noticed(cache: KvdCache, model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(EngineUnsupported, match="did not use layer 1"):
        model(prompt()[:, :20], cache=cache)


# case E2
@pytest.mark.parametrize("step", ["write", "add_tokens"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_between_rows_or_behind_them_is_noticed(
    client: kvd_client.Client,
    model: PreTrainedModel,
    salt: str,
    number: int,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was written for tokens that never got their names must not be taken for that of the next ones."""
    inputs = batch(prompt(20), prompt(24, seed=2))
    with attach(client, model, **inputs, salt=salt) as cache:
        greedy(model, inputs["input_ids"], 1, attention_mask=inputs["attention_mask"], cache=cache)
        inner = getattr(cache.rows[number], step)

        def interrupted(*arguments: Any) -> None:
            if step == "write":
                inner(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(cache.rows[number], step, interrupted)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
        with pytest.raises(KeyboardInterrupt):
            model(
                torch.tensor([[5, 6], [7, 8]]), attention_mask=mask, position_ids=positions(mask)[:, 24:], cache=cache
            )
        monkeypatch.undo()
        for other in ([[9, 10], [11, 12]], [[9], [11]]):
            columns = 24 + len(other[0])
            with pytest.raises(InvalidRequest, match="half way"):
                model(
                    torch.tensor(other),
                    attention_mask=mask[:, :columns],
                    position_ids=positions(mask)[:, 24:columns],
                    cache=cache,
                )


# case E2
def test_a_step_too_long_for_one_row_is_written_in_none(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    prompts = prompt(20), prompt(24, seed=2)
    inputs = batch(*prompts)
    with attach(client, model, **inputs, salt=salt, max_tokens=26) as cache:
        greedy(model, inputs["input_ids"], 1, attention_mask=inputs["attention_mask"], cache=cache)
        for num_new in (3, 2):
            turn = torch.randint(1, 128, (2, 24 + num_new), generator=torch.Generator().manual_seed(num_new))
            turn[:, :24] = inputs["input_ids"]
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, num_new), value=1)
            step = {"attention_mask": mask, "position_ids": positions(mask)[:, 24:], "cache": cache}
            if num_new == 3:
                with pytest.raises(SequenceTooLong):
                    model(turn[:, 24:], **step)
            else:
                expected = model(turn, attention_mask=mask, position_ids=positions(mask)).logits[:, 24:]
                torch.testing.assert_close(model(turn[:, 24:], **step).logits, expected)


# case E2
def test_a_hole_in_a_chunk_still_to_come_is_refused_before_the_first(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    with attach(client, model, prompt(), salt=salt) as cache:
        greedy(model, prompt(), 1, cache=cache)
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[0, 99] = 0
    with attach(client, model, prompt(), salt=salt) as cache:
        with pytest.raises(InvalidRequest, match="hides tokens"):
            greedy(model, prompt(), cache=cache, attention_mask=mask, prefill_chunk_size=2)
        assert cache.get_seq_length() == 96


# case E2
def test_a_cache_closed_in_the_middle_of_a_pass_ends_it(cache: KvdCache, model: PreTrainedModel) -> None:
    with before_layer(model, 1, cache.close), pytest.raises(ClientClosed):
        model(prompt()[:, :20], cache=cache)


# case E2
def test_the_decoder_may_be_called_by_itself_and_by_position(cache: KvdCache, model: PreTrainedModel) -> None:
    control, decoder = DynamicCache(config=model.config), model.get_decoder()
    for ids in (prompt()[:, :90], prompt()[:, 90:]):
        expected = decoder(ids, cache=control).last_hidden_state
        assert torch.equal(decoder(ids, None, None, cache).last_hidden_state, expected)
    assert cache.sequence.num_sealed_tokens == 96


# case E2
def test_tokens_cut_off_behind_the_caches_back_are_missed(cache: KvdCache, model: PreTrainedModel) -> None:
    model(prompt()[:, :50], cache=cache)
    cache.sequence.truncate(40)
    with pytest.raises(InvalidRequest, match="half way"):
        model(prompt()[:, 50:], cache=cache)


def test_a_forgotten_cache_keeps_no_model_alive(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    cache = attach(client, model, prompt(), salt=salt)
    held = weakref.ref(model)
    del model, cache
    gc.collect()
    assert held() is None


# case E2
def test_a_cache_that_outlives_its_model_says_so(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    inputs = batch(prompt(20), prompt(30))
    cache = attach(client, model, **inputs, salt=salt)
    decoder = model.get_decoder()
    del model
    gc.collect()
    ids, mask, places = inputs["input_ids"], inputs["attention_mask"], positions(inputs["attention_mask"])
    with pytest.raises(EngineUnsupported, match="changed"):
        decoder(ids[:, :4], mask[:, :4], places[:, :4], cache=cache)
    with pytest.raises(ClientClosed, match="gone"):
        decoder(ids[:, :1], mask[:, :1], places[:, :1], cache=cache)
    held = num_references(client)
    with pytest.raises(ClientClosed, match="gone") as kept:
        cache.fork()
    assert num_references(client) == held, "although what was raised keeps its frames"
    del kept
    cache.close()


def num_references(client: kvd_client.Client) -> int:
    """Blocks that this session holds, reserved ones included."""
    me = next(each for each in client.status().clients if each.session == client.session_id)
    return me.num_references + me.num_reserved
