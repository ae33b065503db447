"""Models that cannot be served rightly are refused, by name of what stands in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvd.errors import EngineUnsupported, InvalidLayout
from kvd_client.engines.transformers import layout_of, namespace
from tests.engines.tiny import tiny_model


def unloaded(model_class: Any, config: Any) -> Any:
    """A model of full size whose tensors have no memory: enough to look at."""
    with torch.device("meta"):
        return model_class(config).eval()


# case E2
@pytest.mark.parametrize(
    ("model_class", "config", "named"),
    [
        (Llama4ForCausalLM, Llama4TextConfig(num_hidden_layers=2), "chunked_attention"),
        (JambaForCausalLM, JambaConfig(num_hidden_layers=2), "linear_attention"),
        (FalconH1ForCausalLM, FalconH1Config(num_hidden_layers=2), "hybrid"),
        (Gemma4ForCausalLM, Gemma4TextConfig(num_hidden_layers=2), "head_dim"),
        (MambaForCausalLM, MambaConfig(num_hidden_layers=2), "linear_attention"),
        (Qwen3NextForCausalLM, Qwen3NextConfig(num_hidden_layers=2), "linear_attention"),
        (RwkvForCausalLM, RwkvConfig(num_hidden_layers=2), "RwkvForCausalLM"),
        (T5ForConditionalGeneration, T5Config(num_layers=2), "encoder-decoder"),
        (BertLMHeadModel, BertConfig(num_hidden_layers=2), "later tokens"),
        (DeepseekV3ForCausalLM, DeepseekV3Config(num_hidden_layers=2), "MLA"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_layers_that_cannot_share_a_prefix_are_refused_by_name(model_class: Any, config: Any, named: str) -> None:
    with pytest.raises(EngineUnsupported, match=named):
        namespace(unloaded(model_class, config))


def test_a_model_on_another_device_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="meta"):
        namespace(unloaded(type(tiny_model()), tiny_model().config))


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="eval"):
        namespace(tiny_model().train())


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}
    with pytest.raises(EngineUnsupported, match=rope_type):
        namespace(tiny_model(rope_parameters=rope))


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="Linear"):
        namespace(torch.nn.Linear(2, 2))


def test_the_layout_is_the_models_own() -> None:
    layout = layout_of(tiny_model().to(torch.bfloat16))
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (2, 2, 16, "bfloat16")
    assert layout.block_nbytes % 4096 == 0


def test_block_tokens_that_give_no_whole_pages_are_refused() -> None:
    with pytest.raises(InvalidLayout, match="block_tokens=8"):
        layout_of(tiny_model(), block_tokens=1)
