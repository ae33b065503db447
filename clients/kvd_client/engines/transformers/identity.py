"""What names a transformers model's KV: weights, positions, everything else in its configuration, adapters.

A field of the configuration that is not known to be harmless goes in: one too many costs a miss, one too few would
hand out the wrong KV.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvd_client.engines.transformers.support import decoder_config, require_supported
from kvd_client.engines.transformers.weights import tensors_digest, weights_digest

ENGINE = "transformers/1"

_HARMLESS = frozenset(
    {
        *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict", "id2label"),
        *("label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("decoder_start_token_id", "output_attentions", "output_hidden_states", "initializer_range"),
        *("tie_word_embeddings", "chunk_size_feed_forward", "is_encoder_decoder", "quantization_config"),
    }
)
"""Keys that don't change KV, or that the layout or the weights' digest already names."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Fields of a `kvd.hashing.Namespace`."""

    model: str
    positional: str
    adapter: str
    engine: str = ENGINE


_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Hashable, ModelIdentity]] = weakref.WeakKeyDictionary()


def model_identity(model: PreTrainedModel) -> ModelIdentity:
    """The identity of a model as it is now; worked out once and again only when `state_stamp` says it changed.

    Raises `EngineUnsupported` for a model that cannot be served.
    """
    stamp = state_stamp(model)
    known = _known.get(model)
    if known is not None and known[0] == stamp:
        return known[1]
    require_supported(model)
    adapters = _adapter_names(model)
    base = [(name, tensor) for name, tensor in _named_tensors(model) if not _belongs_to(name, adapters)]
    name = getattr(decoder_config(model), "model_type", "") or type(model).__name__
    identity = ModelIdentity(
        model=f"{name}@sha256:{weights_digest(model, base)}",
        positional=_positional(model),
        adapter=_adapter_digest(model, adapters),
    )
    _known[model] = (stamp, identity)
    return identity


def state_stamp(model: PreTrainedModel) -> Hashable:
    """Equal as long as no tensor was exchanged or changed in place, and the same adapters are switched on. Fast.

    A change through `tensor.data` escapes torch's version counter, and so this.
    """
    tensors = (*model.parameters(), *model.buffers())
    return tuple((id(tensor), tensor.data_ptr(), _version(tensor)) for tensor in tensors), _adapters_switched(model)


def _version(tensor: torch.Tensor) -> int:
    # Tensors made under inference_mode count no versions, and cannot be changed outside it.
    return -1 if tensor.is_inference() else tensor._version


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def _positional(model: PreTrainedModel) -> str:
    config = decoder_config(model)
    settings = {key: value for key, value in config.to_dict().items() if key not in _HARMLESS and key[:1] != "_"}
    rope = settings.pop("rope_parameters", None) or settings.pop("rope_scaling", None)
    # Models with several kinds of layers have a table for each, full_attention_inv_freq and so on.
    rotary = [
        (path, name, getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0), _rounded(table))
        for path, module in model.named_modules()
        for name, table in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    return _canonical(
        {
            "rope": _short(rope),
            # As computed, since a configuration can be edited after the model was built from it.
            "rotary": _digest(rotary),
            "max_positions": settings.pop("max_position_embeddings", None),
            "config": _digest(settings),
        }
    )


def _rounded(frequencies: torch.Tensor) -> list[str]:
    # Six digits: the last bits of a power differ between processors.
    return [f"{value:.5e}" for value in frequencies.detach().double().flatten().tolist()]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest(value: object) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _short(value: object) -> object:
    """The value, or its digest where its text would crowd the namespace's field."""
    return value if len(_canonical(value)) <= 1024 else _digest(value)


def _adapter_names(model: PreTrainedModel) -> list[str]:
    return sorted(getattr(model, "peft_config", None) or {})


def _belongs_to(tensor_name: str, adapters: list[str]) -> bool:
    # PEFT lays its tensors out as <layer>.lora_A.<adapter name>.weight.
    parts = tensor_name.split(".")
    return any(adapter in parts for adapter in adapters)


def _adapters_switched(model: PreTrainedModel) -> Hashable:
    """Which adapters are on, as the layers themselves say it."""
    if not _adapter_names(model):
        return ()
    return tuple(
        (
            str(getattr(module, "active_adapters", "")),
            bool(getattr(module, "disable_adapters", False)),
            str(getattr(module, "merged_adapters", "")),
            str(getattr(module, "scaling", "")),
        )
        for module in model.modules()
        if hasattr(module, "base_layer")
    )


def _adapter_digest(model: PreTrainedModel, adapters: list[str]) -> str:
    """SHA-256 over the content of all adapters and which of them are on; empty without any."""
    if not adapters:
        return ""
    tensors = [(name, tensor) for name, tensor in _named_tensors(model) if _belongs_to(name, adapters)]
    settings = {name: _settings_of(model.peft_config[name]) for name in adapters}
    return "sha256:" + _digest([tensors_digest(tensors), settings, _adapters_switched(model)])


def _settings_of(adapter_config: Any) -> object:
    settings = adapter_config.to_dict() if hasattr(adapter_config, "to_dict") else adapter_config
    if isinstance(settings, dict):
        # Sets print in the order of the process's string hashing.
        return {key: sorted(value) if isinstance(value, set | frozenset) else value for key, value in settings.items()}
    return str(settings)
