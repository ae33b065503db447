"""Digests of a model's weights: over its files, remembered by size and time, or over the tensors themselves.

A digest of the files alone would miss a model that was changed after it was loaded (fine-tuned, merged, or only
configured from that folder), so samples of every tensor in memory go in too. Without files all bytes go in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

SAMPLES_PER_TENSOR = 64


class _Record(msgspec.Struct, frozen=True):
    """What is remembered of one weight file; valid as long as size and time are those of the file."""

    nbytes: int
    mtime_ns: int
    sha256: str


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
    flat = tensor.detach().contiguous().reshape(-1)
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


def file_digest(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes; remembered beside it, or in the user's cache where that is read-only."""
    stat = path.stat()
    for place in _record_places(path):
        record = _read_record(place)
        if record is not None and (record.nbytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return record.sha256
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        _remember(path, _Record(stat.st_size, stat.st_mtime_ns, sha256))
    return sha256


def _record_places(path: Path) -> Iterator[Path]:
    yield path.with_name(f".{path.name}.kvd-sha256")
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    yield Path(cache_home) / "kvd" / "weights" / f"{name}.json"


def _read_record(place: Path) -> _Record | None:
    try:
        return msgspec.json.decode(place.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


def _remember(path: Path, record: _Record) -> None:
    """Writes the record to the first place that takes it. Never raises: without a record the file is read again."""
    for number, place in enumerate(_record_places(path)):
        with contextlib.suppress(OSError):
            if number:
                place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, msgspec.json.encode(record))
            return


def _replace(place: Path, content: bytes) -> None:
    """Readers see the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=place.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(place)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
