"""The parts of vLLM's configuration that the connector looks at, of an engine that can be served; tests change them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK_SIZE = 32
LAYERS = ["first", "second", "third"]


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))


def engine(folder: Path | str, **parts: dict[str, Any]) -> Any:
    """A `VllmConfig`; `parts` change fields: `engine(folder, model_config={"dtype": torch.float16})`."""
    config: dict[str, dict[str, Any]] = {
        "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "device_config": {"device_type": "cpu"},
        "load_config": {"load_format": "auto"},
        "model_config": {
            "model": str(folder),
            "hf_config": HfConfig(model_type="llama", rope_theta=10000.0),
            "dtype": torch.bfloat16,
            "quantization": None,
            "model_impl": "auto",
            "runner_type": "generate",
            "max_model_len": 512,
            "is_encoder_decoder": False,
        },
    }
    made = {name: SimpleNamespace(**(fields | parts.pop(name, {}))) for name, fields in config.items()}
    return SimpleNamespace(**made, **({"speculative_config": None, "weight_transfer_config": None} | parts))


def kv_cache(
    *, groups: int = 1, layers: list[str] = LAYERS, is_eagle: bool = False, spec: Any = None, **fields: Any
) -> Any:
    """A `KVCacheConfig` of the layout in `test_parts`; `fields` change its `FullAttentionSpec`."""
    plain = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    spec = spec or FullAttentionSpec(**(plain | fields))
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec, is_eagle_group=is_eagle)
    return SimpleNamespace(kv_cache_groups=[group] * groups, kv_cache_layout="NHD")
