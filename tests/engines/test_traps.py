"""Calls that would silently use a cache for other tokens than it holds: the right result, or a typed error."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import kvd_client
from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, KvdError, SequenceTooLong
from kvd_client.engines.transformers import KvdCache, attach
from tests.engines.tiny import BLOCK_TOKENS, greedy, prompt, tiny_model

NUM_PROMPT, NUM_CACHED = 100, 96


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def warm(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> Iterator[KvdCache]:
    """A cache that holds the first 96 tokens of `prompt()`, found and not computed."""
    with attach(client, model, prompt(), salt=salt) as first:
        greedy(model, prompt(), 1, cache=first)
    with attach(client, model, prompt(), salt=salt) as cache:
        assert cache.num_cached_tokens == cache.get_seq_length() == NUM_CACHED
        yield cache


def changed_at(place: int) -> torch.Tensor:
    """The prompt with one other token."""
    ids = prompt()
    ids[0, place] = ids[0, place] % 127 + 1
    return ids


def ones(num_tokens: int) -> torch.Tensor:
    return torch.ones(1, num_tokens, dtype=torch.long)


Call = Callable[[PreTrainedModel, KvdCache], Any]

REFUSED: dict[str, tuple[type[KvdError], str, Call]] = {
    "a cache as long as the prompt": (
        InvalidRequest,
        "at least one token more",
        lambda model, cache: greedy(model, prompt()[:, :NUM_CACHED], cache=cache),
    ),
    "a cache longer than the prompt": (
        InvalidRequest,
        "at least one token more",
        lambda model, cache: greedy(model, prompt()[:, :50], cache=cache),
    ),
    # case A8
    "cached tokens that are not the prompt's": (
        InvalidRequest,
        "only the first 3 are the prompt's",
        lambda model, cache: greedy(model, changed_at(3), cache=cache),
    ),
    # case A8
    "another prompt altogether": (
        InvalidRequest,
        "other tokens",
        lambda model, cache: greedy(model, prompt(seed=9), cache=cache),
    ),
    # case A8
    "cached tokens that are not the prompt's, under the older name": (
        InvalidRequest,
        "only the first 3 are the prompt's",
        lambda model, cache: model.generate(changed_at(3), past_key_values=cache, max_new_tokens=2),
    ),
    "another token behind the cached ones": (
        InvalidRequest,
        "not those this KvdCache was attached for",
        lambda model, cache: greedy(model, changed_at(98), cache=cache),
    ),
    "only new tokens without the whole mask": (
        InvalidRequest,
        "at least one token more",
        lambda model, cache: greedy(model, prompt()[:, NUM_CACHED:], cache=cache),
    ),
    "only new tokens, more than are cached, without the whole mask": (
        InvalidRequest,
        "other tokens",
        lambda model, cache: greedy(model, prompt(NUM_CACHED + 20, seed=5), cache=cache),
    ),
    "a mask of other length": (
        InvalidRequest,
        "mask of the whole sequence",
        lambda model, cache: greedy(model, prompt()[:, NUM_CACHED:], cache=cache, attention_mask=ones(99)),
    ),
    "a padded prompt": (
        InvalidRequest,
        "hides tokens",
        lambda model, cache: greedy(
            model, prompt(), cache=cache, attention_mask=ones(100).index_fill(1, ones(1)[0], 0)
        ),
    ),
    "the whole prompt fed to the model itself": (
        InvalidRequest,
        "4 are left to compute",
        lambda model, cache: model(prompt(), cache=cache),
    ),
    "only new tokens at positions from 0": (
        InvalidRequest,
        "position ids",
        lambda model, cache: model(prompt()[:, NUM_CACHED:], cache=cache, position_ids=torch.arange(4)[None]),
    ),
    "a custom mask": (
        EngineUnsupported,
        "custom attention mask",
        lambda model, cache: model(prompt()[:, NUM_CACHED:], cache=cache, attention_mask=torch.zeros(1, 1, 4, 100)),
    ),
    "a batch": (
        EngineUnsupported,
        "one sequence",
        lambda model, cache: greedy(model, prompt().repeat(2, 1), cache=cache),
    ),
    "a batch fed to the model itself": (
        EngineUnsupported,
        "one sequence",
        lambda model, cache: model(prompt()[:, NUM_CACHED:].repeat(2, 1), cache=cache),
    ),
    "ids without a row": (
        EngineUnsupported,
        "one sequence",
        lambda model, cache: model(prompt()[0, NUM_CACHED : NUM_CACHED + 1], cache=cache),
    ),
    "a prompt without a row": (
        EngineUnsupported,
        "attach with the whole batch",
        lambda model, cache: greedy(model, prompt()[0, :1], cache=cache),
    ),
    "a position twice": (
        InvalidRequest,
        "position ids",
        lambda model, cache: model(prompt()[:, 96:], cache=cache, position_ids=torch.tensor([[96, 97, 98, 98]])),
    ),
    "more positions than tokens": (
        InvalidRequest,
        "position ids",
        lambda model, cache: model(prompt()[:, 96:], cache=cache, position_ids=torch.arange(95, 100)[None]),
    ),
    "a row there is not": (InvalidRequest, "rows", lambda _, cache: cache.reorder_cache(torch.tensor([1]))),
    "a row counted from the end": (InvalidRequest, "rows", lambda _, cache: cache.reorder_cache(torch.tensor([-1]))),
    "no row at all": (InvalidRequest, "rows", lambda _, cache: cache.batch_select_indices(torch.tensor([False]))),
    "more beams than rows were made for": (
        EngineUnsupported,
        "attach with the whole batch",
        lambda model, cache: greedy(model, prompt().repeat(3, 1), cache=cache, num_beams=2),
    ),
    "embeddings instead of ids": (
        EngineUnsupported,
        "input_ids",
        lambda model, cache: greedy(
            model, None, cache=cache, inputs_embeds=model.get_input_embeddings()(prompt()).detach()
        ),
    ),
    "embeddings fed to the model itself": (
        EngineUnsupported,
        "input_ids",
        lambda model, cache: model(inputs_embeds=model.get_input_embeddings()(prompt()[:, 96:]).detach(), cache=cache),
    ),
    "no use of the cache": (
        EngineUnsupported,
        "use_cache",
        lambda model, cache: greedy(model, prompt(), cache=cache, use_cache=False),
    ),
    "no use of the cache, by configuration": (
        EngineUnsupported,
        "use_cache",
        lambda model, cache: model.generate(prompt(), cache=cache, generation_config=GenerationConfig(use_cache=False)),
    ),
    "more than the cache may hold, behind new tokens only": (
        SequenceTooLong,
        "max_tokens=2100",
        lambda model, cache: greedy(model, prompt()[:, 96:], 2000, cache=cache, attention_mask=ones(100)),
    ),
    "more tokens than the cache may hold": (
        SequenceTooLong,
        "max_tokens=2100",
        lambda model, cache: greedy(model, prompt(), 2000, cache=cache),
    ),
    "gradients": (
        EngineUnsupported,
        "no_grad",
        lambda model, cache: torch.enable_grad()(model)(prompt()[:, NUM_CACHED:], cache=cache),
    ),
    "another dtype in the middle": (
        EngineUnsupported,
        "bfloat16",
        lambda model, cache: torch.autocast("cpu", torch.bfloat16)(model)(prompt()[:, NUM_CACHED:], cache=cache),
    ),
    "another model of the same shape": (
        EngineUnsupported,
        "another model",
        lambda _, cache: tiny_model(seed=5)(prompt()[:, NUM_CACHED:], cache=cache),
    ),
    "a copy of the model": (
        EngineUnsupported,
        "another model",
        lambda model, cache: greedy(copy.deepcopy(model), prompt(), cache=cache),
    ),
    "a positive count to crop": (InvalidRequest, "-96 .. 0", lambda _, cache: cache.crop(90)),
    "more to crop than there is": (InvalidRequest, "-96 .. 0", lambda _, cache: cache.crop(-97)),
    "one layer cropped": (EngineUnsupported, "by itself", lambda _, cache: cache.layers[0].crop(-1)),
    "one layer reordered": (EngineUnsupported, "by itself", lambda _, cache: cache.layers[1].reorder_cache(None)),
    "one layer moved elsewhere": (EngineUnsupported, "by itself", lambda _, cache: cache.offload(0)),
    "pickling": (EngineUnsupported, "pickled", lambda _, cache: pickle.dumps(cache)),
}


# case E2
@pytest.mark.parametrize("trap", REFUSED)
def test_is_refused_and_the_cache_stays_usable(warm: KvdCache, model: PreTrainedModel, trap: str) -> None:
    error, says, call = REFUSED[trap]
    expected = greedy(model, prompt())
    with torch.no_grad(), pytest.raises(error, match=says):
        call(model, warm)
    assert warm.get_seq_length() == NUM_CACHED
    assert torch.equal(greedy(model, prompt(), cache=warm), expected)


# case E2
def test_a_used_cache_is_refused_for_another_prompt(warm: KvdCache, model: PreTrainedModel) -> None:
    greedy(model, prompt(), cache=warm)
    for other in (prompt(), prompt(130, seed=9), prompt(130)):
        with pytest.raises(InvalidRequest):
            greedy(model, other, cache=warm)


# case E2
def test_a_conversation_goes_on_in_the_same_cache(warm: KvdCache, model: PreTrainedModel) -> None:
    turn = torch.cat([greedy(model, prompt(), cache=warm), prompt(20, seed=3)], dim=1)
    assert torch.equal(greedy(model, turn, cache=warm), greedy(model, turn))
    assert warm.get_seq_length() == turn.shape[1] + 8 - 1


# case E2
def test_after_generate_the_cache_holds_one_token_fewer(warm: KvdCache, model: PreTrainedModel) -> None:
    output = greedy(model, prompt(), cache=warm)
    assert warm.get_seq_length() == output.shape[1] - 1
    assert warm.sequence.token_ids == output[0, :-1].tolist()


# case E2
def test_only_new_tokens_with_the_whole_mask_are_right(warm: KvdCache, model: PreTrainedModel) -> None:
    output = greedy(model, prompt()[:, NUM_CACHED:], cache=warm, attention_mask=ones(NUM_PROMPT))
    assert output[0, 4:].tolist() == greedy(model, prompt())[0, NUM_PROMPT:].tolist()


# case E2
def test_the_older_argument_name_works(warm: KvdCache, model: PreTrainedModel) -> None:
    with pytest.warns(FutureWarning, match="past_key_values"):
        output = model.generate(prompt(), past_key_values=warm, max_new_tokens=8, do_sample=False)
    assert torch.equal(output, greedy(model, prompt()))
    assert warm.get_seq_length() == output.shape[1] - 1


# case E2
def test_prefill_in_chunks_is_right(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    for num_cached in (0, NUM_CACHED):
        with attach(client, model, prompt(), salt=salt) as cache:
            assert cache.num_cached_tokens == num_cached
            output = greedy(model, prompt(), cache=cache, prefill_chunk_size=3)
        assert torch.equal(output, greedy(model, prompt()))


# case E2
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_fork(warm: KvdCache, model: PreTrainedModel, copied: Callable[[KvdCache], KvdCache]) -> None:
    turn = torch.cat([greedy(model, prompt(), cache=warm), prompt(20, seed=3)], dim=1)
    with copied(warm) as fork:
        warm.crop(-20)
        assert torch.equal(greedy(model, turn, cache=fork), greedy(model, turn))
        assert torch.equal(greedy(model, prompt(), cache=warm), greedy(model, prompt()))


# case E2
@pytest.mark.parametrize("num_left", [99, NUM_CACHED, 90, BLOCK_TOKENS, 0])
def test_a_cropped_cache_goes_on_with_other_tokens(warm: KvdCache, model: PreTrainedModel, num_left: int) -> None:
    greedy(model, prompt(), cache=warm)
    warm.crop(num_left - warm.get_seq_length())
    assert warm.get_seq_length() == num_left
    other = torch.cat([prompt()[:, :num_left], prompt(30, seed=4)], dim=1)
    assert torch.equal(greedy(model, other, cache=warm), greedy(model, other))


# case E2
@pytest.mark.parametrize("changed_at_place", [105, 99, 96, 40, 0])
def test_a_turn_that_is_rendered_differently_keeps_what_is_common(
    warm: KvdCache, model: PreTrainedModel, changed_at_place: int
) -> None:
    turn = torch.cat([greedy(model, prompt(), cache=warm), prompt(20, seed=3)], dim=1)
    turn[0, changed_at_place] = turn[0, changed_at_place] % 127 + 1
    with pytest.raises(InvalidRequest):
        greedy(model, turn, cache=warm)
    assert warm.align(turn) == warm.get_seq_length() == changed_at_place
    assert torch.equal(greedy(model, turn, cache=warm), greedy(model, turn))


def test_aligning_leaves_one_token_to_compute(warm: KvdCache, model: PreTrainedModel) -> None:
    output = greedy(model, prompt(), cache=warm)
    assert warm.align(output[0, :50].tolist()) == 49
    assert torch.equal(greedy(model, output[:, :50], cache=warm), greedy(model, output[:, :50]))
    assert warm.align([]) == warm.get_seq_length() == 0


def test_what_was_found_and_cut_off_counts_no_more(warm: KvdCache) -> None:
    warm.crop(-50)
    assert warm.num_cached_tokens == 46
    warm.close()
    assert warm.num_cached_tokens == 0


def test_a_reset_cache_is_empty(warm: KvdCache, model: PreTrainedModel) -> None:
    warm.reset()
    other = prompt(seed=4)
    assert torch.equal(greedy(model, other, cache=warm), greedy(model, other))


# case E2
def test_a_pass_that_stopped_half_way_spoils_only_its_cache(warm: KvdCache, model: PreTrainedModel) -> None:
    def stop(*_: object) -> None:
        raise MemoryError("half way")

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(MemoryError):
        greedy(model, prompt(), cache=warm)
    hook.remove()
    with warm.fork() as fork:
        for cache in (warm, fork):
            with pytest.raises(InvalidRequest, match="half way"):
                greedy(model, prompt(), cache=cache)


# case E2
def test_weights_changed_under_an_attached_cache_are_noticed(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    own = copy.deepcopy(model)
    with attach(client, own, prompt(), salt=salt) as cache:
        with torch.no_grad():
            own.model.layers[0].mlp.up_proj.weight.mul_(2)
        with pytest.raises(EngineUnsupported, match="changed"):
            greedy(own, prompt(), cache=cache)


# case E2
def test_token_types_are_refused_and_nothing_of_them_is_published(client: kvd_client.Client, salt: str) -> None:
    """They are added to what a GPT-2 embeds, zeros too, and no name of a block knows of them."""
    model = tiny_gpt2()
    expected = greedy(model, prompt())
    assert not torch.equal(greedy(model, prompt(), token_type_ids=torch.zeros_like(prompt())), expected)
    with attach(client, model, prompt(), salt=salt) as cache:
        with pytest.raises(EngineUnsupported, match="token_type_ids"):
            greedy(model, prompt(), cache=cache, token_type_ids=torch.zeros_like(prompt()))
        assert cache.num_columns == 0
        assert torch.equal(greedy(model, prompt(), cache=cache), expected)


# case E2
def test_a_model_switched_to_training_is_refused(client: kvd_client.Client, salt: str) -> None:
    model = tiny_gpt2()
    with attach(client, model, prompt(), salt=salt) as cache:
        greedy(model, prompt(), cache=cache)
        held = cache.num_columns
        model.train()
        with torch.no_grad(), pytest.raises(EngineUnsupported, match=r"model\.eval"):
            model(prompt(1), cache=cache)
        model.eval()
        assert cache.num_columns == held


def tiny_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 128, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()


def test_a_closed_cache_says_so(warm: KvdCache, model: PreTrainedModel) -> None:
    warm.close()
    warm.close()
    with pytest.raises(ClientClosed):
        greedy(model, prompt(), cache=warm)


def test_the_model_is_as_before_when_the_last_cache_closes(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    decoder = model.get_decoder()
    before = dict(vars(model)), list(decoder._forward_pre_hooks), list(decoder._forward_hooks)
    with attach(client, model, prompt(), salt=salt) as outer:
        with attach(client, model, prompt(), salt=salt, wait_s=0.0):
            pass
        with pytest.raises(InvalidRequest):
            greedy(model, prompt()[:, :0], cache=outer)
        twin = copy.deepcopy(model)
        assert twin.generate.__self__ is twin
    assert (dict(vars(model)), list(decoder._forward_pre_hooks), list(decoder._forward_hooks)) == before


def test_a_cache_that_is_forgotten_gives_everything_back(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    cache = attach(client, model, prompt(), salt=salt)
    greedy(model, prompt(), cache=cache)
    held = weakref.ref(cache)
    del cache
    assert held() is None


def test_other_caches_pass_through_untouched(warm: KvdCache, model: PreTrainedModel) -> None:
    assert torch.equal(greedy(model, prompt(), num_beams=2), tiny_beams(model))
    assert warm.get_seq_length() == NUM_CACHED


def tiny_beams(model: PreTrainedModel) -> torch.Tensor:
    return greedy(copy.deepcopy(tiny_model()), prompt(), num_beams=2)
