"""The layouts and prompts that rows share."""

from __future__ import annotations

from kvd.layout import KVLayout

MIB = 1 << 20

SEGMENT_NBYTES = 256 * MIB
"""What "auto" chooses for a budget of 16 GiB and more; the bench's own small budgets would get smaller ones."""

SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
"""SmolLM2-135M in fp16: 360 KiB for 16 tokens."""

TWO_MIB = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128)
"""Llama-3-8B in fp16: exactly 2 MiB for 16 tokens."""

ONE_PAGE = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64)
"""The smallest block, 4 KiB for 16 tokens: the most blocks for the memory."""


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids that share no block with another seed's, above every small int that Python keeps ready."""
    return [1000 + (seed * 7919 + place) % 40_000 for place in range(num_tokens)]
