"""The shape of a model's KV, from a Hugging Face folder (config.json) or a GGUF file, without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from kvd.cli.gguf_header import Value, read_gguf_header
from kvd.errors import EngineUnsupported, InvalidRequest
from kvd.layout import ITEMSIZE_BY_DTYPE

MAX_CONFIG_NBYTES = 16 << 20


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a layout is made of. `dtype` is the model's own, or float16 where the file does not say."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_positions: int
    """0 when the file does not say."""
    note: str = ""
    """What the figures leave out, such as sliding windows."""


def model_shape(model: Path) -> ModelShape:
    """Of a folder with config.json, that file itself, or a GGUF file.

    Raises `InvalidRequest` for what is neither, `EngineUnsupported` for a model whose KV has no such shape.
    """
    if model.is_dir():
        config = model / "config.json"
        if not config.exists():
            ggufs = sorted(model.glob("*.gguf"))
            if len(ggufs) != 1:
                raise InvalidRequest(f"{model} has no config.json, and not exactly one GGUF file: name the file")
            return _of_gguf(ggufs[0])
        return _of_config(config)
    return _of_config(model) if model.suffix == ".json" else _of_gguf(model)


def _of_config(path: Path) -> ModelShape:
    try:
        if path.stat().st_size > MAX_CONFIG_NBYTES:
            raise InvalidRequest(f"{path} is too large to be a model's configuration")
        config = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{path} is no model's configuration")
    name = str(config.get("_name_or_path") or path.resolve().parent.name)
    text = config.get("text_config")
    if isinstance(text, dict):  # of a model that sees images too: its decoder's own
        config = {**config, **text}
    if config.get("kv_lora_rank"):
        raise EngineUnsupported(f"{path}: latent attention (MLA) keeps no keys and values of a head each")
    if config.get("is_encoder_decoder"):
        raise EngineUnsupported(f"{path}: an encoder-decoder's cross-attention KV does not belong to tokens")
    num_heads = _number(config, path, "num_attention_heads", "n_head")
    hidden = _number(config, path, "hidden_size", "n_embd", "d_model")
    num_kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    return ModelShape(
        name=name,
        num_layers=_number(config, path, "num_hidden_layers", "n_layer"),
        num_kv_heads=num_kv_heads if _is_count(num_kv_heads) else num_heads,
        head_dim=head_dim if _is_count(head_dim) else hidden // num_heads,
        dtype=dtype if dtype in ITEMSIZE_BY_DTYPE else "float16",
        max_positions=_number(config, path, "max_position_embeddings", "n_positions", default=0),
        note=_note(config.get("layer_types"), config.get("sliding_window")),
    )


def _of_gguf(path: Path) -> ModelShape:
    header = read_gguf_header(path)
    family = header.get("general.architecture")
    if not isinstance(family, str):
        raise InvalidRequest(f"{path} does not say of which family it is")
    own = {key.removeprefix(f"{family}."): value for key, value in header.items() if key.startswith(f"{family}.")}
    if "attention.kv_lora_rank" in own:
        raise EngineUnsupported(f"{path}: latent attention (MLA) keeps no keys and values of a head each")
    num_heads = _number(own, path, "attention.head_count")
    embedding = _number(own, path, "embedding_length")
    key_length = _number(own, path, "attention.key_length", default=embedding // num_heads)
    value_length = _number(own, path, "attention.value_length", default=key_length)
    return ModelShape(
        name=str(header.get("general.name") or path.stem),
        num_layers=_number(own, path, "block_count"),
        num_kv_heads=_number(own, path, "attention.head_count_kv", default=num_heads),
        # Of a head, keys and values may differ in length; the mean of both gives the right number of bytes.
        head_dim=(key_length + value_length) // 2,
        dtype="float16",
        max_positions=_number(own, path, "context_length", default=0),
        note=_note(None, own.get("attention.sliding_window")),
    )


def _number(fields: dict[str, Any] | dict[str, Value], path: Path, *names: str, default: int | None = None) -> int:
    """The first of these that is there. A list is one number a layer: the greatest."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            value = max(value)
        if _is_count(value):
            return value
    if default is None:
        raise InvalidRequest(f"{path} does not say {' or '.join(names)}")
    return default


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32


def _note(layer_types: object, sliding_window: object) -> str:
    if isinstance(layer_types, list):
        others = sorted({str(one) for one in layer_types} - {"full_attention"})
        if others:
            return f"counted as if all layers had full attention; some have {', '.join(others)}"
    if _is_count(sliding_window):
        return "counted as if all layers had full attention; some may have a sliding window"
    return ""
