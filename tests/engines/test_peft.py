"""Real LoRA adapters: what was computed with one is found with that one only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

import kvd_client
from kvd.errors import EngineUnsupported
from kvd_client.engines.transformers import attach, shared
from tests.engines.tiny import greedy, prompt, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def adapted(scale: float = 0.3, **settings: Any) -> PeftModel:
    """The tiny model with an adapter called "default" whose matrices are far from nothing."""
    defaults = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_model(), LoraConfig(**(defaults | settings)))
    fill(model, scale)
    return model.eval()


def fill(model: PeftModel, scale: float, adapter: str = "default") -> None:
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name:
            torch.nn.init.normal_(parameter.data, std=scale)


def generate(client: kvd_client.Client, model: PeftModel, salt: str) -> int:
    """How many tokens were found; what comes out is what comes out without kvd."""
    expected = model.generate(prompt(), max_new_tokens=10, do_sample=False)
    with attach(client, model, prompt(), salt=salt) as cache:
        found = cache.num_cached_tokens
        assert torch.equal(model.generate(prompt(), cache=cache, max_new_tokens=10, do_sample=False), expected)
    return found


# case A5
def test_an_adapter_finds_its_own(client: kvd_client.Client, salt: str) -> None:
    plain = tiny_model()
    with attach(client, plain, prompt(), salt=salt) as cache:
        greedy(plain, prompt(), cache=cache)
    assert generate(client, adapted(), salt) == 0
    assert generate(client, adapted(), salt) == 96  # another model object with the same content
    assert generate(client, adapted(scale=0.2), salt) == 0
    assert generate(client, adapted(lora_alpha=3), salt) == 0


# case A5
def test_switching_and_turning_off_adapters(client: kvd_client.Client, salt: str) -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    fill(model, 0.4, "other")
    model.eval()
    assert generate(client, model, salt) == 0
    model.set_adapter("other")
    assert generate(client, model, salt) == 0
    model.set_adapter("default")
    assert generate(client, model, salt) == 96
    with model.disable_adapter():
        assert generate(client, model, salt) == 0
    assert generate(client, model, salt) == 96


# case A5
def test_an_adapter_switched_under_an_attached_cache_is_noticed(client: kvd_client.Client, salt: str) -> None:
    model = adapted()
    refused = pytest.raises(EngineUnsupported, match="adapters changed")
    with attach(client, model, prompt(), salt=salt) as cache, model.disable_adapter(), refused:
        model.generate(prompt(), cache=cache, max_new_tokens=2)


def test_a_plain_call_of_the_wrapper_is_served(client: kvd_client.Client, salt: str) -> None:
    model = adapted()
    expected = model.generate(input_ids=prompt(), max_new_tokens=10, do_sample=False)
    with shared(model, client, salt=salt) as statistics:
        for _ in range(2):
            assert torch.equal(model.generate(input_ids=prompt(), max_new_tokens=10, do_sample=False), expected)
        assert (statistics.num_served, statistics.num_cached_tokens) == (2, 96)


def test_learned_prompts_are_refused(client: kvd_client.Client, salt: str) -> None:
    """Their virtual tokens stand before the prompt and have no ids."""
    model = get_peft_model(tiny_model(), PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    with pytest.raises(EngineUnsupported, match="virtual tokens"):
        attach(client, model, prompt(), salt=salt)
