"""What names an engine's KV: weights, configuration, the arrangement of a block, the rank.

vLLM's own block hashes are not used: they begin with a random number in each process. A field of the configuration that
is not known to be harmless goes in: one too many costs a miss, one too few would hand out the wrong KV.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm

from kvd.errors import EngineUnsupported
from kvd.hashing import Namespace
from kvd_client.engines.files import file_digest
from kvd_client.engines.transformers.weights import weight_files
from kvd_client.engines.vllm.names import Variant
from kvd_client.engines.vllm.support import layout_of

ENGINE = "vllm/1"
"""A block is [blocks of vLLM, num_layers, heads, block_size, keys and values as vLLM keeps them]."""

_HARMLESS = frozenset({"transformers_version", "torch_dtype", "dtype", "use_cache", "id2label", "label2id"})
_LOAD_FORMATS = frozenset({"auto", "safetensors", "hf", "fastsafetensors"})
_UNSTABLE_ROPE = ("longrope", "dynamic", "su")
"""Kinds whose frequencies follow from the longest prompt that the engine admits."""


class Names:
    """Namespaces of one engine's ranks."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *, model: str | None) -> None:
        """Reads the weights' files whole the first time (about 1 GB/s). Raises `EngineUnsupported`, `InvalidLayout`."""
        self.layout = layout_of(kv_cache_config)
        self.num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self.model = model or _model_name(vllm_config)
        self._config = _digest(_config_of(vllm_config))
        self._arrangement = _digest(_arrangement_of(kv_cache_config))

    def namespace(self, rank: int, variant: Variant) -> Namespace:
        """Of one tensor-parallel rank's blocks."""
        positional = {"config": self._config, "layout": self._arrangement, "rank": f"{rank}/{self.num_ranks}"}
        return Namespace(
            model=self.model,
            layout=self.layout,
            engine=ENGINE,
            positional=_canonical(positional),
            adapter=variant.adapter,
            salt=variant.salt,
        )


def _model_name(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    files = _weight_files(model) if load_format in _LOAD_FORMATS else []
    if not files:
        raise EngineUnsupported(
            f"the weights of {model.model!r} (load format {load_format}) lie in no safetensors files, so nothing tells "
            f"them from others; name them yourself: the key model in kv_connector_extra_config"
        )
    digest = hashlib.sha256(b"kvd vllm weights 1")
    try:
        for file in files:
            digest.update(f"{file.name}\0".encode() + bytes.fromhex(file_digest(file)))
    except OSError as error:
        raise EngineUnsupported(f"the weights cannot be read: {error}") from error
    return f"{getattr(model.hf_config, 'model_type', '') or 'model'}@sha256:{digest.hexdigest()}"


def _weight_files(model: Any) -> list[Path]:
    commit = getattr(model.hf_config, "_commit_hash", None)
    named = weight_files(SimpleNamespace(config=SimpleNamespace(_name_or_path=model.model, _commit_hash=commit)))
    # Which of several sets vLLM takes is its own affair: all that lie there count.
    return sorted({path for file in named for path in file.parent.glob("*.safetensors")})


def _config_of(vllm_config: Any) -> dict[str, object]:
    model = vllm_config.model_config
    settings = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in _HARMLESS and not key.startswith("_")
    }
    rope = str(settings.get("rope_parameters") or settings.get("rope_scaling") or "")
    return {
        "model": settings,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "implementation": str(getattr(model, "model_impl", "")),
        "runner": str(getattr(model, "runner_type", "")),
        "max_model_len": model.max_model_len if any(kind in rope for kind in _UNSTABLE_ROPE) else None,
    }


def _arrangement_of(kv_cache_config: Any) -> dict[str, object]:
    """All that decides where in vLLM's blocks a number lies, and how it is written down."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return {
        "vllm": vllm.__version__,
        "layout": str(kv_cache_config.kv_cache_layout),
        "layers": group.layer_names,
        "spec": [type(spec).__name__, spec.block_size, spec.num_kv_heads, spec.head_size, str(spec.dtype)],
        # On the CPU the kernels' instruction set decides how keys are packed.
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "tiles": bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)()),
    }


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest(value: object) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()
