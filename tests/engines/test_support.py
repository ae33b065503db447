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
    GPT2Config,
    GPT2LMHeadModel,
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
from tests.engines.tiny import tiny_model, windowed_model


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


# case E2
def test_a_model_of_which_a_part_is_not_loaded_is_refused() -> None:
    model = tiny_model()
    model.model.rotary_emb.to("meta")
    with pytest.raises(EngineUnsupported, match="cpu, meta"):
        namespace(model)


# case E2
def test_chunks_are_refused_where_only_their_size_says_so() -> None:
    """They look like windows to transformers' own cache."""
    model = windowed_model("mistral")
    model.config.attention_chunk_size = 16
    with pytest.raises(EngineUnsupported, match="layer 0"):
        namespace(model)


def test_a_decoder_without_its_head_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="does not generate"):
        namespace(tiny_model().model)


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


# case E2
def test_rope_of_one_kind_of_layers_is_looked_at_too() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    rope = {"sliding_attention": plain, "full_attention": plain | {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(EngineUnsupported, match="dynamic"):
        namespace(windowed_model("gemma3", rope_parameters=rope))


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(EngineUnsupported, match="Linear"):
        namespace(torch.nn.Linear(2, 2))


def test_the_layout_is_the_models_own() -> None:
    layout = layout_of(tiny_model().to(torch.bfloat16))
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (2, 2, 16, "bfloat16")
    assert layout.block_nbytes % 4096 == 0


def test_a_configuration_without_heads_of_keys_or_their_size_means_one_for_each() -> None:
    layout = layout_of(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128)))
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 4, 16)


def test_block_tokens_that_give_no_whole_pages_are_refused() -> None:
    with pytest.raises(InvalidLayout, match="block_tokens=8"):
        layout_of(tiny_model(), block_tokens=1)
