"""KV whose every number follows from the token, its place, the layer and the head: any reader can say what is right."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import torch

from kvd.layout import KVLayout
from kvd_client.sequence_view import SequenceView

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=64, block_tokens=16)
MODEL = "test@1"


def keys_values(
    layer: int, token_ids: Ids[int], start: int, stop: int, layout: KVLayout = LAYOUT
) -> tuple[torch.Tensor, torch.Tensor]:
    """What layer holds for tokens start .. stop, each [num_kv_heads, n, head_dim]."""
    tokens = torch.tensor(token_ids[start:stop], dtype=torch.int64)
    places = torch.arange(start, stop)
    base = (tokens * 31 + places * 7 + layer * 131) % 1000
    heads = torch.arange(layout.num_kv_heads)[:, None, None] * 8
    dims = (torch.arange(layout.head_dim) % 8)[None, None, :]
    keys = (base[None, :, None] + heads + dims).to(getattr(torch, layout.dtype))
    return keys, -keys


def fill(seq: object, token_ids: Ids[int], stop: int | None = None) -> None:
    """Appends the right KV to every layer of a blocking sequence, up to `stop`."""
    stop = len(token_ids) if stop is None else stop
    for layer in range(seq.layout.num_layers):  # type: ignore[attr-defined]
        start = seq.num_tokens_in(layer)  # type: ignore[attr-defined]
        seq.append(layer, *keys_values(layer, token_ids, start, stop, seq.layout))  # type: ignore[attr-defined]


def holds(seq: SequenceView, token_ids: Ids[int], num_tokens: int) -> bool:
    """Whether every layer shows exactly the right KV of the first `num_tokens`."""
    for layer in range(seq.layout.num_layers):
        at = 0
        for keys, values in seq.parts(layer):
            stop = at + keys.shape[1]
            right = keys_values(layer, token_ids, at, stop, seq.layout)
            if not (torch.equal(keys, right[0]) and torch.equal(values, right[1])):
                return False
            at = stop
        if at != num_tokens:
            return False
    return True
