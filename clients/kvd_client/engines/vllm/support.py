"""Which vLLM engines can be served rightly, and the layout of their blocks.

Not covered: sliding windows, recurrent and hybrid models, latent attention (MLA), quantized caches, speculative
decoding, pipeline and context parallelism, KV on a device other than the CPU, weights that are changed while
the engine runs.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvd.block import PAGE_NBYTES
from kvd.errors import EngineUnsupported
from kvd.layout import KVLayout

SERVED_DTYPES = frozenset({"float16", "bfloat16", "float32"})


def require_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises `EngineUnsupported` with the reason unless every block of the engine's cache can be shared rightly."""
    reason = (
        _reason_of_the_transfer(vllm_config.kv_transfer_config)
        or _reason_of_the_engine(vllm_config)
        or _reason_of_the_cache(kv_cache_config)
    )
    if reason:
        raise EngineUnsupported(reason)


def _reason_of_the_transfer(transfer: Any) -> str:
    if transfer.kv_load_failure_policy != "recompute":
        return 'kv_load_failure_policy must be "recompute", or a block that is evicted meanwhile fails its request'
    return ""


def _reason_of_the_engine(config: Any) -> str:
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "with pipeline parallelism each rank has other layers"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or (
        getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "with context parallelism a block is spread over ranks"
    if config.speculative_config is not None:
        return "with speculative decoding blocks hold tokens that may be rejected"
    if getattr(config, "weight_transfer_config", None) is not None:
        return "the weights may be changed while the engine runs"
    if config.model_config.is_encoder_decoder:
        return "the model is an encoder-decoder: its cross-attention KV belongs to the encoder's input"
    if config.device_config.device_type != "cpu":
        return f"its KV lies on {config.device_config.device_type}; kvd serves engines on the CPU so far"
    return ""


def _reason_of_the_cache(cache: Any) -> str:
    if len(cache.kv_cache_groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups})
        return f"its layers have several kinds of cache ({', '.join(kinds) or 'none'}); only full attention is shared"
    group = cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"its layers have a cache of the kind {type(spec).__name__}; only full attention is shared"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "it has layers with a sliding window or chunks, which keep less than the whole prefix"
    if spec.non_causal or group.is_eagle_group or spec.tokens_per_state != 1:
        return "its cache holds more than what follows from the tokens before"
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in SERVED_DTYPES or spec.kv_quant_mode.value:
        return f"its cache holds {dtype}, quantized by scales that kvd does not know"
    dense = spec.num_heads == spec.num_kv_heads and spec.state_content_bytes is None
    if not dense or spec.head_size != spec.head_size_v:
        return "its keys and values differ in shape, or are packed"
    return ""


def layout_of(kv_cache_config: Any) -> KVLayout:
    """One rank's layout: the smallest multiple of vLLM's block that is whole pages. Raises `InvalidLayout`."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    block_nbytes = (
        spec.block_size * len(group.layer_names) * spec.num_kv_heads * 2 * spec.head_size * spec.dtype.itemsize
    )
    factor = PAGE_NBYTES // math.gcd(PAGE_NBYTES, block_nbytes)
    return KVLayout(
        num_layers=len(group.layer_names),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_tokens=spec.block_size * factor,
    )
