"""Digests of a model's weights: over its files, remembered by size and time, or over the tensors themselves.

A digest of the files alone would miss a model that was changed after it was loaded (fine-tuned, merged, or only
configured from that folder), so samples of every tensor in memory go in too. Without files all bytes go in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from kvd_client.engines.files import file_digest

SAMPLES_PER_TENSOR = 64


def weights_digest(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hexadecimal SHA-256 that names the model's weights.

    `tensors` are the (name, tensor) pairs to take in. The first call for a file reads it whole (about 1 GB/s); later
    calls, by any process, read the remembered digest.
    """
    digest = hashlib.sha256(b"kvd weights 1")
    files = weight_files(model)
    for file in files:
        digest.update(bytes.fromhex(file_digest(file)))
    for name, tensor in sorted(tensors):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(_bytes_of(_sampled(tensor) if files else tensor))
    return digest.hexdigest()


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hexadecimal SHA-256 over names, dtypes, shapes and every byte."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLES_PER_TENSOR)
    return flat[::step][:SAMPLES_PER_TENSOR]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # numpy's arrays have the buffer interface; its type stubs for Python 3.11 don't say so.
    return memoryview(cast("bytes", flat.view(torch.uint8).numpy()))


def weight_files(model: Any) -> list[Path]:
    """The safetensors or GGUF files a transformers model was loaded from, sorted; empty when that is not certain."""
    folder = _folder_of(model.config)
    if folder is None:
        return []
    gguf_name = _gguf_name(model.config)
    if gguf_name:
        names = {Path(gguf_name).name}
    elif (index := folder / "model.safetensors.index.json").is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    elif (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    else:
        # A model unpacked from a GGUF file no longer says so; a single one in its folder is that one.
        names = {path.name for path in folder.glob("*.gguf")}
        names = names if len(names) == 1 else set()
    files = sorted(folder / name for name in names)
    return files if all(file.is_file() for file in files) else []


def _gguf_name(config: Any) -> str:
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):
        return quantization.get("gguf_file") or ""
    return getattr(quantization, "gguf_file", None) or ""


def _folder_of(config: Any) -> Path | None:
    name = getattr(config, "_name_or_path", "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for entry in ("model.safetensors.index.json", "model.safetensors", "config.json"):
        try:
            cached = try_to_load_from_cache(name, entry, revision=getattr(config, "_commit_hash", None))
        except HFValidationError:
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None
