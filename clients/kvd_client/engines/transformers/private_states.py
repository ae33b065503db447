"""Keys and values in this process's own memory: where a generation goes on when the daemon has no more for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from kvd_client.engines.transformers.split_attention import Part

_GROWTH_TOKENS = 256


class PrivateStates:
    """Per layer one growing tensor [2, num_kv_heads, capacity, head_dim]. One thread at a time."""

    def __init__(self, layers: list[torch.Tensor], lengths: list[int]) -> None:
        self._layers = layers
        self._lengths = lengths

    @classmethod
    def copy_of(cls, parts_by_layer: Sequence[Sequence[Part]]) -> Self:
        """Copies what lies in the parts of each layer, joined."""
        layers = []
        for parts in parts_by_layer:
            keys, values = (torch.cat([part[which] for part in parts], dim=1) for which in (0, 1))
            layers.append(torch.stack([keys, values]))
        return cls(layers, [layer.shape[2] for layer in layers])

    def copy(self) -> Self:
        """Another with the same content."""
        layers = [layer[:, :, :length].clone() for layer, length in zip(self._layers, self._lengths, strict=True)]
        return type(self)(layers, list(self._lengths))

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(layer[:, :, :length].nbytes for layer, length in zip(self._layers, self._lengths, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens in every layer."""
        return min(self._lengths)

    def num_tokens_in(self, layer: int) -> int:
        """Tokens in one layer."""
        return self._lengths[layer]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes [num_kv_heads, n, head_dim] behind what the layer holds."""
        start, stop = self._lengths[layer], self._lengths[layer] + keys.shape[1]
        own = self._layers[layer]
        if stop > own.shape[2]:
            grown = own.new_empty(2, own.shape[1], max(stop, own.shape[2] * 3 // 2) + _GROWTH_TOKENS, own.shape[3])
            grown[:, :, :start].copy_(own[:, :, :start])
            self._layers[layer] = own = grown
        own[0, :, start:stop].copy_(keys.detach())
        own[1, :, start:stop].copy_(values.detach())
        self._lengths[layer] = stop

    def layer(self, layer: int) -> Part:
        """Views of one layer's keys and values."""
        own, length = self._layers[layer], self._lengths[layer]
        return own[0, :, :length], own[1, :, :length]

    def truncate(self, num_tokens: int) -> None:
        """Forgets the tokens from `num_tokens` on; tensors over them may be overwritten later."""
        self._lengths = [min(length, num_tokens) for length in self._lengths]
