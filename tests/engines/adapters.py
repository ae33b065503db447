"""A tiny model with a LoRA adapter laid out as PEFT does it: the same attributes and tensor names."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.engines.tiny import tiny_model


class LoraLayer(nn.Module):
    """A projection and its low-rank correction."""

    def __init__(self, base_layer: nn.Linear, name: str, scale: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        down, up = nn.Linear(base_layer.in_features, 2, bias=False), nn.Linear(2, base_layer.out_features, bias=False)
        nn.init.constant_(up.weight, scale)
        nn.init.constant_(down.weight, 1.0)
        self.lora_A, self.lora_B = nn.ModuleDict({name: down}), nn.ModuleDict({name: up})
        self.active_adapters, self.disable_adapters, self.merged_adapters = [name], False, []
        self.scaling = {name: 1.0}

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(states)
        for name in self.active_adapters:
            result = result + self.lora_B[name](self.lora_A[name](states)) * self.scaling[name]
        return result


def adapted(name: str = "french", scale: float = 0.1, settings: object = None) -> PreTrainedModel:
    """The tiny model with the adapter in every layer's query and key projection."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLayer(layer.self_attn.q_proj, name, scale)
        layer.self_attn.k_proj = LoraLayer(layer.self_attn.k_proj, name, scale)
    model.peft_config = {name: settings or {"r": 2, "target_modules": {"q_proj", "k_proj"}}}
    return model
