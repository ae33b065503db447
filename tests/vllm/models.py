"""Tiny random models as folders that vLLM loads; a forward pass takes milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 128
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def llama(folder: Path, *, seed: int = 0) -> Path:
    """32 KiB a block of 32 tokens in float32."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**_SIZES)).save_pretrained(folder)
    return folder


def windowed(folder: Path) -> Path:
    """Gemma-3: one of two layers has a sliding window."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **_SIZES, sliding_window=32, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=32
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def adapter(folder: Path, *, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the queries and values of `llama`, large enough to change what is generated."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{base}.lora_B.weight"] = torch.randn(rows, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (num_tokens,), generator=generator).tolist()
