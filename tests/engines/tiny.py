"""Tiny random models with an exact answer: no download, a forward pass takes milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
WINDOWED = {
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
"""Families with sliding windows: each every second layer, every second layer and a bound on scores, every layer."""
VOCABULARY = 128
BLOCK_TOKENS = 16


def tiny_model(family: str = "llama", *, seed: int = 0, attention: str = "sdpa", **settings: Any) -> PreTrainedModel:
    """2 layers x 2 x 2 heads x 16: a block of 16 tokens in float32 has 8 KiB."""
    config_class, model_class = (FAMILIES | WINDOWED)[family]
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attn_implementation": attention,
        # Wide enough that greedy choices differ from token to token.
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return model_class(config_class(**(defaults | settings))).eval()


def prompt(num_tokens: int = 100, *, seed: int = 1) -> torch.Tensor:
    """Token ids [1, num_tokens], none of them the padding's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, num_tokens), generator=generator)


def windowed_model(family: str, *, window: int = 20, attention: str = "sdpa", **settings: Any) -> PreTrainedModel:
    """A tiny model with windows far smaller than `prompt()`."""
    kinds: dict[str, Any] = {"sliding_window": window}
    if family != "mistral":
        kinds["layer_types"] = ["sliding_attention", "full_attention"]
    if family == "gemma2":
        kinds |= {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}
        attention = "eager"
    return tiny_model(family, attention=attention, **(kinds | settings))


def batch(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Prompts [1, n] of any lengths as `input_ids` and `attention_mask`, padded on the left."""
    longest = max(ids.shape[1] for ids in prompts)
    padded = [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(ids), (longest - ids.shape[1], 0)) for ids in prompts]
    return {"input_ids": torch.cat(padded), "attention_mask": torch.cat(masks)}


def greedy(model: PreTrainedModel, input_ids: torch.Tensor, num_new: int = 8, **arguments: Any) -> torch.Tensor:
    """Prompt and greedy continuation, [1, n + num_new]."""
    return model.generate(input_ids, max_new_tokens=num_new, do_sample=False, **arguments)
