"""Which transformers models can be served rightly, and the layout of their KV. Everything else is refused aloud.

Not covered: chunked attention, recurrent and hybrid layers, layers that share another layer's KV, latent (MLA)
attention, encoder-decoders, models spread over devices.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvd.errors import EngineUnsupported
from kvd.layout import KVLayout

UNSTABLE_ROPE_TYPES = frozenset({"dynamic", "longrope"})
"""Their frequencies depend on the longest position seen, so equal tokens may have unequal keys."""


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself. Raises `EngineUnsupported` for others, and for
    adapters that put tokens of their own before the prompt.
    """
    for name, settings in (getattr(model, "peft_config", None) or {}).items():
        if getattr(settings, "is_prompt_learning", False):
            raise EngineUnsupported(
                f"adapter {name!r} puts virtual tokens before the prompt, and kvd knows KV by its tokens: run this "
                f"model without kvd"
            )
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise EngineUnsupported(f"{type(model).__name__} is not a transformers model")
    return inner


def decoder_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder; of a plain language model, its only one."""
    return model.config.get_text_config(decoder=True)


def require_supported(model: PreTrainedModel) -> None:
    """Raises `EngineUnsupported`, naming the layer type or the setting, unless every layer is full or sliding attention
    of a kind whose KV depends on nothing but the tokens up to its own.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise EngineUnsupported(
            f"{name} is an encoder-decoder: its cross-attention KV belongs to the encoder's input, not to tokens"
        )
    if not model.can_generate() or not model._supports_default_dynamic_cache():
        raise EngineUnsupported(f"{name} does not generate over a KV cache of its tokens")
    _require_attention(model, name)
    layout_of(model)
    if getattr(decoder_config(model), "kv_lora_rank", None):
        raise EngineUnsupported(f"{name} has latent attention (MLA): its keys and values differ in shape")
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or "meta" in devices:
        raise EngineUnsupported(
            f"{name} is on {', '.join(sorted(devices))}: all of it must be on one device, and loaded"
        )


def require_eval(model: PreTrainedModel) -> None:
    """Raises `EngineUnsupported` in training mode, which can be switched at any time and is looked at each time."""
    if model.training:
        name = type(model).__name__
        raise EngineUnsupported(f"{name} is in training mode (dropout would get into the KV): call model.eval() first")


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """Per layer how many tokens a token sees, itself included; None for all before it."""
    layers = DynamicCache(config=decoder_config(model)).layers
    return [layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None for layer in layers]


def _require_attention(model: PreTrainedModel, name: str) -> None:
    config = decoder_config(model)
    # What transformers itself would cache with is the best word on what each layer needs.
    layers = DynamicCache(config=config).layers
    declared = getattr(config, "layer_types", None) or [None] * len(layers)
    for index, (layer, declared_kind) in enumerate(zip(layers, declared, strict=False)):
        # Chunked attention has the same cache layer, but its chunks are counted from a row's own padding.
        slides = type(layer) is DynamicSlidingWindowLayer and declared_kind in {None, "sliding_attention"}
        if getattr(config, "attention_chunk_size", None) is not None:
            slides = False
        if type(layer) is not DynamicLayer and not slides:
            raise EngineUnsupported(
                f"layer {index} of {name} is {_kind_of(layer, declared_kind)}: only full_attention and "
                f"sliding_attention layers can share a prefix; run this model without kvd"
            )
    for path, module in model.named_modules():
        if getattr(module, "is_causal", True) is False and hasattr(module, "layer_idx"):
            raise EngineUnsupported(f"{path} of {name} attends to later tokens: its KV depends on what follows")
        kinds = getattr(module, "rope_type", None)
        for rope_type in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if rope_type in UNSTABLE_ROPE_TYPES:
                raise EngineUnsupported(
                    f"{name} has {rope_type!r} rope: its keys depend on how long the sequence is going to be"
                )


def _kind_of(layer: Any, declared: str | None) -> str:
    if declared is not None and declared != "full_attention":
        return declared
    return "sliding_attention" if getattr(layer, "is_sliding", False) else type(layer).__name__


def layout_of(model: PreTrainedModel, block_tokens: int | None = None) -> KVLayout:
    """The layout of the model's KV in the model's own dtype.

    `block_tokens` defaults to the fewest from 16 up that give whole pages. Raises `InvalidLayout` (also for
    a dtype that kvd does not know) or `EngineUnsupported`.
    """
    config = decoder_config(model)
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        # transformers itself raises on asking for one that differs between layers.
        sizes = {getattr(layer, name, None) for layer in getattr(config, "per_layer_config", ())}
        if len(sizes) > 1:
            raise EngineUnsupported(f"{type(model).__name__} has layers of different {name}: a block has one size")
    num_heads = config.num_attention_heads
    dtype = str(model.dtype).removeprefix("torch.")
    kv_sizes: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        "dtype": dtype,
    }
    return KVLayout.fit(**kv_sizes) if block_tokens is None else KVLayout(**kv_sizes, block_tokens=block_tokens)


def require_shape(
    layout: KVLayout, keys: torch.Tensor, values: torch.Tensor, *, num_rows: int, device: torch.device
) -> None:
    """Raises `EngineUnsupported` unless both are [num_rows, num_kv_heads, n, head_dim] in the layout's dtype there."""
    for name, states in (("keys", keys), ("values", values)):
        shape = tuple(states.shape)
        if shape[0] != num_rows:
            raise EngineUnsupported(
                f"a batch of {shape[0]} rows over a cache of {num_rows}: attach with the whole batch"
            )
        if (shape[1], shape[3]) != (layout.num_kv_heads, layout.head_dim) or shape[2] != keys.shape[2]:
            raise EngineUnsupported(
                f"the model's {name} have shape {list(shape)}, its configuration says "
                f"[{num_rows}, {layout.num_kv_heads}, n, {layout.head_dim}]"
            )
        if str(states.dtype) != f"torch.{layout.dtype}" or states.device != device:
            raise EngineUnsupported(
                f"the model's {name} are {states.dtype} on {states.device}, the cache holds {layout.dtype} on "
                f"{device}; attach under the same dtype and without autocast, and where the model is"
            )
    if keys.requires_grad or values.requires_grad:
        raise EngineUnsupported("gradients do not flow through a shared cache: call the model under torch.no_grad()")
