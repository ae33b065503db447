"""Tiny random models with an exact answer: no download, a forward pass takes milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
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
VOCABULARY = 128
BLOCK_TOKENS = 16


def tiny_model(family: str = "llama", *, seed: int = 0, attention: str = "sdpa", **settings: Any) -> PreTrainedModel:
    """2 layers x 2 x 2 heads x 16: a block of 16 tokens in float32 has 8 KiB."""
    config_class, model_class = FAMILIES[family]
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


def greedy(model: PreTrainedModel, input_ids: torch.Tensor, num_new: int = 8, **arguments: Any) -> torch.Tensor:
    """Prompt and greedy continuation, [1, n + num_new]."""
    return model.generate(input_ids, max_new_tokens=num_new, do_sample=False, **arguments)
