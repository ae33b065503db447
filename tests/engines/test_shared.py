"""`shared(model)`: plain `generate` over the cache, and as before where that cannot be."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import kvd_client
from kvd.cli.demo.daemon import private_daemon
from kvd.errors import InvalidRequest
from kvd_client.engines.transformers import KvdCache, attach, shared
from kvd_client.engines.transformers.sharing import Sharing
from kvd_client.engines.transformers.wrapping import wrap_generate
from tests.client.test_fork import in_child
from tests.engines.test_batches import OwnAttention
from tests.engines.tiny import batch, greedy, prompt, tiny_model


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


def padded() -> dict[str, torch.Tensor]:
    return batch(prompt(40, seed=2), prompt(), prompt(77, seed=3))


CALLS: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "greedy": lambda model: model.generate(prompt(), max_new_tokens=8, do_sample=False),
    "ids by name": lambda model: model.generate(input_ids=prompt(), max_new_tokens=8),
    "the default number of tokens": lambda model: model.generate(prompt()),
    "the greatest length": lambda model: model.generate(prompt(), max_length=120),
    "a padded batch": lambda model: model.generate(**padded(), max_new_tokens=8),
    "a padded batch without its mask": lambda model: model.generate(padded()["input_ids"], max_new_tokens=8),
    "beams": lambda model: model.generate(prompt(), max_new_tokens=8, num_beams=3, num_return_sequences=2),
    "an assistant": lambda model: model.generate(prompt(), max_new_tokens=8, assistant_model=tiny_model(seed=3)),
    "looking up": lambda model: model.generate(prompt(), max_new_tokens=8, prompt_lookup_num_tokens=3),
    "chunks": lambda model: model.generate(prompt(), max_new_tokens=8, prefill_chunk_size=30),
    "a padding's token that also ends": lambda model: model.generate(
        padded()["input_ids"], max_new_tokens=8, eos_token_id=[0, 5]
    ),
}


# case E2
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("call", CALLS)
def test_a_plain_call_is_served(client: kvd_client.Client, model: PreTrainedModel, salt: str, call: str) -> None:
    expected = CALLS[call](model)
    with shared(model, client, salt=salt) as statistics:
        assert torch.equal(CALLS[call](model), expected)
        assert statistics.num_cached_tokens == 0
        assert torch.equal(CALLS[call](model), expected)
        assert (statistics.num_calls, statistics.num_served, statistics.last_reason) == (2, 2, "")
        assert statistics.num_cached_tokens >= 96
        assert statistics.hit_rate == statistics.num_cached_tokens / statistics.num_prompt_tokens
    assert "generate" not in vars(model)


def takes_more(model: PreTrainedModel) -> None:
    """A model that takes inputs beside the ids; what it does with them does not matter here."""
    inner = model.forward

    def forward(*args: Any, token_type_ids: Any = None, pixel_values: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.forward = forward
    model._validate_model_kwargs = lambda _: None


def own_loop(model: PreTrainedModel, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """A way to generate that kvd knows nothing of."""
    return model(input_ids).logits.argmax(-1)


def embeddings(model: PreTrainedModel) -> torch.Tensor:
    return model.get_input_embeddings()(prompt()).detach()


NOT_SERVED: dict[str, tuple[str, Callable[[PreTrainedModel], torch.Tensor]]] = {
    "no cache": ("use_cache", lambda model: model.generate(prompt(), max_new_tokens=4, use_cache=False)),
    "another kind of cache": (
        "cache_implementation",
        lambda model: model.generate(prompt(), max_new_tokens=4, cache_implementation="static"),
    ),
    "embeddings": (
        "inputs_embeds",
        lambda model: model.generate(inputs_embeds=embeddings(model), max_new_tokens=4),
    ),
    "a mask with a hole": (
        "mask",
        lambda model: model.generate(
            prompt(), attention_mask=torch.ones(1, 100).index_fill(1, torch.tensor([5]), 0), max_new_tokens=4
        ),
    ),
    "no cache, by configuration": (
        "use_cache",
        lambda model: model.generate(
            prompt(), generation_config=GenerationConfig(max_new_tokens=4, use_cache=False, pad_token_id=0)
        ),
    ),
    "a configuration by position": (
        "by position",
        lambda model: model.generate(prompt(), GenerationConfig(max_new_tokens=4, pad_token_id=0)),
    ),
    "positions": (
        "position_ids",
        lambda model: model.generate(prompt(), position_ids=torch.arange(100)[None], max_new_tokens=4),
    ),
    "another way to generate": (
        "custom_generate",
        lambda model: model.generate(prompt(), custom_generate=own_loop, max_new_tokens=4),
    ),
    "pictures": (
        "pixel_values",
        lambda model: model.generate(prompt(), pixel_values=torch.zeros(1, 3, 4, 4), max_new_tokens=4),
    ),
    "nothing to begin with": (
        "no input_ids",
        lambda model: model.generate(bos_token_id=1, max_new_tokens=4),
    ),
    "token types": (
        "token types",
        lambda model: model.generate(prompt(), token_type_ids=torch.ones_like(prompt()), max_new_tokens=4),
    ),
}


# case E2
@pytest.mark.parametrize("call", NOT_SERVED)
def test_what_cannot_be_served_runs_as_before_and_says_why_once(
    client: kvd_client.Client, salt: str, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    reason, generate = NOT_SERVED[call]
    model = tiny_model()
    if call in {"token types", "pictures"}:
        takes_more(model)
    expected = generate(model)
    with caplog.at_level(logging.WARNING), shared(model, client, salt=salt) as statistics:
        for _ in range(2):
            assert torch.equal(generate(model), expected)
        assert statistics.num_served == 0
        assert reason in statistics.last_reason
    told = [record for record in caplog.records if record.name.startswith("kvd_client")]
    assert len(told) == 1
    assert reason in told[0].getMessage()


def test_a_model_that_kvd_does_not_know_runs_as_before(client: kvd_client.Client) -> None:
    model = tiny_model().train()
    torch.manual_seed(0)
    expected = greedy(model, prompt())
    with shared(model, client) as statistics:
        torch.manual_seed(0)
        assert torch.equal(greedy(model, prompt()), expected)
        assert "training" in statistics.last_reason


class Counted(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_what_is_found_out_at_the_first_step_runs_as_before(client: kvd_client.Client, salt: str) -> None:
    """Padding over a model with its own attention: known only when it attends. The prompt is streamed once."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)
    ids = torch.nn.functional.pad(prompt(20), (4, 0))
    arguments = {"attention_mask": (ids != 0).long(), "max_new_tokens": 4, "do_sample": False}
    expected, streamer = model.generate(ids, **arguments), Counted()
    with shared(model, client, salt=salt) as statistics:
        assert torch.equal(model.generate(ids, **arguments, streamer=streamer), expected)
        assert "by itself" in statistics.last_reason
    assert streamer.tokens == expected[0].tolist()


def test_an_error_in_the_middle_is_the_callers(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    """Running once more without kvd would say the first tokens twice."""
    lengths: list[int] = []

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        if len(lengths) == 3:
            raise InvalidRequest("the caller's own")
        return scores

    with shared(model, client, salt=salt), pytest.raises(InvalidRequest, match="own"):
        greedy(model, prompt(), logits_processor=LogitsProcessorList([stop]))
    assert lengths == [100, 101, 102]


def test_an_assistant_within_a_call_is_no_call_of_its_own(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    """As where every model of a process shares: its proposals are cut off again, and nobody else wants them."""
    assistant, sharing = tiny_model(seed=3), Sharing(client, salt=salt)
    expected = greedy(model, prompt())
    undo = [wrap_generate(each, sharing.generate) for each in (model, assistant)]
    assert torch.equal(greedy(model, prompt(), assistant_model=assistant), expected)
    assert sharing.statistics.num_calls == 1
    assert torch.equal(greedy(model, prompt()), expected)
    assert sharing.statistics.num_calls == 2
    for each in undo:
        each()


def test_the_callers_own_caches_pass_through(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    with shared(model, client, salt=salt) as statistics:
        own = DynamicCache(config=model.config)
        assert torch.equal(greedy(model, prompt(), cache=own), greedy(tiny_model(), prompt()))
        with attach(client, model, prompt(), salt=salt) as cache:
            assert torch.equal(greedy(model, prompt(), cache=cache), greedy(tiny_model(), prompt()))
        assert statistics.num_calls == 0


def test_it_does_not_matter_which_of_two_ends_first(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    expected = greedy(model, prompt())
    cache = attach(client, model, prompt(), salt=salt)
    with shared(model, client, salt=salt) as statistics:
        cache.close()
        assert torch.equal(greedy(model, prompt()), expected)
        cache = attach(client, model, prompt(), salt=salt)
        assert statistics.num_served == 1
    assert torch.equal(greedy(model, prompt(), cache=cache), expected)
    cache.close()
    assert torch.equal(greedy(model, prompt()), expected)
    assert statistics.num_calls == 1
    assert not model.get_decoder()._forward_hooks


def test_a_copy_of_a_shared_model_is_a_model_of_its_own(
    client: kvd_client.Client, model: PreTrainedModel, salt: str
) -> None:
    with shared(model, client, salt=salt) as statistics:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.mul_(2)
        greedy(model, prompt())
        found = greedy(other, prompt())
        assert (statistics.num_served, statistics.num_cached_tokens) == (2, 0)
    assert torch.equal(greedy(other, prompt()), found)
    assert not torch.equal(greedy(model, prompt()), found)


def test_a_returned_cache_serves_the_next_turn(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    with shared(model, client, salt=salt):
        result = greedy(model, prompt(), return_dict_in_generate=True)
        assert isinstance(result.cache, KvdCache)
        turn = torch.cat([result.sequences, prompt(9, seed=4)], dim=1)
        assert torch.equal(greedy(model, turn, cache=result.cache), greedy(tiny_model(), turn))
        result.cache.close()


# case E2
def test_a_conversation_finds_each_earlier_turn(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    with shared(model, client, salt=salt) as statistics:
        ids, held = prompt(), 0
        for turn in range(3):
            before = statistics.num_cached_tokens
            output = greedy(model, ids, 30, attention_mask=torch.ones_like(ids))
            assert statistics.num_cached_tokens - before == held // 16 * 16
            assert torch.equal(output, greedy(tiny_model(), ids, 30, attention_mask=torch.ones_like(ids)))
            held = output.shape[1] - 1
            ids = torch.cat([output, prompt(20, seed=10 + turn)], dim=1)


def test_several_threads_at_once(client: kvd_client.Client, model: PreTrainedModel, salt: str) -> None:
    prompts = [torch.cat([prompt()[:, :64], prompt(20, seed=seed)], dim=1) for seed in range(4)]
    expected = [greedy(model, ids, 20) for ids in prompts]
    found: dict[int, torch.Tensor] = {}
    with shared(model, client, salt=salt) as statistics:
        threads = [
            threading.Thread(target=lambda at=at: found.setdefault(at, greedy(model, prompts[at], 20)))
            for at in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statistics.num_served == 4
    assert all(torch.equal(found[at], expected[at]) for at in range(4))
    assert not model.get_decoder()._forward_hooks


def test_without_a_daemon_it_runs_as_before_and_finds_the_daemon_later(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(model, prompt())
    monkeypatch.setenv("KVD_RUNTIME_DIR", str(tmp_path / "nowhere"))
    with shared(model) as statistics:
        assert torch.equal(greedy(model, prompt()), expected)
        assert "nowhere" in statistics.last_reason
        with private_daemon("--memory-budget", "16MiB", "--memory-segment", "1MiB") as daemon:
            monkeypatch.setenv("KVD_RUNTIME_DIR", str(daemon.runtime_dir))
            for _ in range(2):
                assert torch.equal(greedy(model, prompt()), expected)
            assert (statistics.num_served, statistics.num_cached_tokens) == (2, 96)
        # Gone again: as before once more.
        assert torch.equal(greedy(model, prompt()), expected)
        assert (statistics.num_calls, statistics.num_served) == (4, 2)


def test_a_model_whose_name_cannot_be_worked_out_runs_as_before(
    client: kvd_client.Client, tmp_path: Path, model: PreTrainedModel
) -> None:
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    expected = greedy(loaded, prompt())
    (tmp_path / "model.safetensors.index.json").write_text("no JSON")
    with shared(loaded, client) as statistics:
        assert torch.equal(greedy(loaded, prompt()), expected)
    assert statistics.num_served == 0
    assert "JSONDecodeError" in statistics.last_reason


# case B9
def test_a_forked_child_connects_for_itself_and_its_parent_goes_on(runtime_dir: Path) -> None:
    sharing = Sharing(runtime_dir=runtime_dir)
    own = sharing._client()

    def child() -> str:
        other = sharing._client()
        Sharing(own).close()
        said = f"{other is sharing._client()} {other.session_id == own.session_id}"
        sharing.close()
        return said

    assert in_child(child) == "True False"
    assert sharing._client() is own
    own.check()
    sharing.close()


def test_a_returned_cache_does_not_keep_it_from_a_new_daemon(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared(model) as statistics:
        with private_daemon("--memory-budget", "16MiB", "--memory-segment", "1MiB") as daemon:
            monkeypatch.setenv("KVD_RUNTIME_DIR", str(daemon.runtime_dir))
            kept = greedy(model, prompt(), return_dict_in_generate=True)
        with private_daemon("--memory-budget", "16MiB", "--memory-segment", "1MiB") as daemon:
            monkeypatch.setenv("KVD_RUNTIME_DIR", str(daemon.runtime_dir))
            assert torch.equal(greedy(model, prompt()), kept.sequences)
        assert statistics.num_served == 2
