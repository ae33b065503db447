"""A cache for code that has its own attention: one tensor of keys and one of values a layer.

Start `kvd serve`, then run this twice: `python clients/examples/contiguous.py`.
"""

from __future__ import annotations

import torch

import kvd_client
from kvd_client.engines.contiguous import ContiguousCache

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
token_ids = list(range(1000, 1200))


def compute(layer: int, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a model: keys and values [heads, tokens, dim] of one layer."""
    keys = torch.tensor(ids, dtype=torch.float16)[None, :, None].expand(NUM_KV_HEADS, -1, HEAD_DIM) + layer
    return keys, -keys


with (
    kvd_client.connect() as client,
    ContiguousCache(
        client,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_tokens=4096,
        layout="hsd",
        model="example@1",
    ) as cache,
):
    num_found = cache.attach(token_ids)
    for layer in range(NUM_LAYERS):
        keys, values = cache.update(layer, *compute(layer, token_ids[num_found:]))  # all of the layer, no copy
        if not torch.equal(keys, compute(layer, token_ids)[0]):
            raise SystemExit(f"layer {layer} holds other keys than its tokens have")
    num_shared = cache.commit(token_ids)
    print(f"{num_found} of {len(token_ids)} tokens were there, {num_shared} are shared now: {cache}")
