"""`kvd size`: the figures of a model from its files alone, and what fits where."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvd.cli.app import app
from kvd.cli.gguf_header import read_gguf_header
from kvd.cli.model_shape import model_shape
from kvd.errors import EngineUnsupported, InvalidRequest
from kvd.layout import KVLayout
from tests.fakecuda.machine import P40, FakeMachine
from tests.support.daemon import running_daemon

KVD = [sys.executable, "-m", "kvd.cli"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "float16",
}


def folder(where: Path, config: dict[str, Any]) -> Path:
    (made := where / "a-model").mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made


def gguf(path: Path, pairs: list[tuple[str, int, bytes]], *, version: int = 3) -> Path:
    data = struct.pack("<4sIQQ", b"GGUF", version, 0, len(pairs))
    for name, kind, value in pairs:
        data += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    path.write_bytes(data)
    return path


def text_value(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def numbers(**more: int) -> list[tuple[str, int, bytes]]:
    found = {
        "block_count": 30,
        "embedding_length": 576,
        "attention.head_count": 9,
        "attention.head_count_kv": 3,
        **more,
    }
    pairs = [(f"llama.{name}", 4, struct.pack("<I", value)) for name, value in found.items()]
    return [("general.architecture", 8, text_value("llama")), *pairs]


def size(*args: str) -> Any:
    return CliRunner().invoke(app, ["size", *args], prog_name="kvd")


def test_a_folder_of_transformers(tmp_path):
    result = size(str(folder(tmp_path, LLAMA)), "--budget", "4GiB")
    assert result.stdout == (
        "a-model: 32 layers, 8 KV heads of 128, float16\n"
        "  a token    128 KiB (131,072 bytes)\n"
        "  a block    2 MiB (16 tokens)\n"
        "  a context  1 GiB (8,192 tokens)\n"
        "budget, 4 GiB: 32,768 tokens in 2,048 blocks, 4 whole contexts\n"
    )


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, (32, 8, 128, "float16", 8192)),
        ({"num_key_value_heads": None}, (32, 32, 128, "float16", 8192)),
        ({"head_dim": 64}, (32, 8, 64, "float16", 8192)),
        ({"dtype": "bfloat16"}, (32, 8, 128, "bfloat16", 8192)),
        ({"torch_dtype": "int4"}, (32, 8, 128, "float16", 8192)),
        ({"text_config": {"num_hidden_layers": 4}}, (4, 8, 128, "float16", 8192)),
    ],
)
def test_what_a_configuration_may_say(tmp_path, config, shape):
    found = model_shape(folder(tmp_path, LLAMA | config))
    assert (found.num_layers, found.num_kv_heads, found.head_dim, found.dtype, found.max_positions) == shape


def test_a_gguf_file(tmp_path):
    path = gguf(tmp_path / "m.gguf", [*numbers(context_length=2048), ("general.name", 8, text_value("Smol"))])
    assert "Smol: 30 layers, 3 KV heads of 64, float16\n" in size(str(path), "--budget", "1GiB").stdout
    assert model_shape(tmp_path) == model_shape(path)


def test_one_number_a_layer_counts_as_the_greatest(tmp_path):
    heads = struct.pack("<IQ3I", 4, 3, 2, 8, 4)
    path = gguf(tmp_path / "m.gguf", [*numbers()[:-1], ("llama.attention.head_count_kv", 9, heads)])
    assert model_shape(path).num_kv_heads == 8


def test_vocabularies_are_passed_over(tmp_path):
    words = struct.pack("<IQ", 8, 2) + text_value("a") + text_value("b")
    path = gguf(tmp_path / "m.gguf", [("tokenizer.ggml.tokens", 9, words), *numbers()])
    assert "tokenizer.ggml.tokens" not in read_gguf_header(path)
    assert model_shape(path).num_layers == 30


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"PK\3\4" + bytes(40),
        struct.pack("<4sIQQ", b"GGUF", 9, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text_value("x") + struct.pack("<IIQ", 9, 4, 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text_value("x") + struct.pack("<I", 77),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
        + text_value("x")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 40,
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 0),
    ],
)
def test_a_file_that_is_no_gguf_is_refused_in_a_line(tmp_path, content):
    (path := tmp_path / "m.gguf").write_bytes(content)
    result = size(str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("kvd: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "{}", json.dumps(LLAMA | {"num_hidden_layers": True}), "[" * 100_000]
)
def test_a_folder_that_says_too_little_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest):
        model_shape(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        model_shape(tmp_path)


@pytest.mark.parametrize("config", [{"kv_lora_rank": 512}, {"is_encoder_decoder": True}])
def test_kv_of_another_kind_is_refused(tmp_path, config):
    with pytest.raises(EngineUnsupported):
        model_shape(folder(tmp_path, LLAMA | config))


def test_windows_are_named(tmp_path):
    config = LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}
    assert "some have sliding_attention" in size(str(folder(tmp_path, config)), "--budget", "1GiB").stdout


def test_options_change_the_layout(tmp_path):
    path = str(folder(tmp_path, LLAMA))
    found = json.loads(size(path, "--budget", "1GiB", "--dtype", "float32", "--block-tokens", "8", "--json").stdout)
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="float32", block_tokens=8)
    assert (found["token_nbytes"], found["block_nbytes"]) == (layout.token_nbytes, layout.block_nbytes)
    small = LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}
    (tmp_path / "small").mkdir()
    refused = size(str(folder(tmp_path / "small", small)), "--block-tokens", "3")
    assert (refused.exit_code, "use block_tokens=" in refused.stderr) == (2, True)
    assert size(path, "--budget", "much").exit_code == 2


def test_the_running_daemon_says_what_fits(tmp_path):
    model = str(folder(tmp_path, LLAMA))
    with running_daemon(tmp_path, budget="64MiB") as daemon:
        result = size(model, "--runtime-dir", str(daemon.folder), "--context", "100")
    assert "memory (host), 64 MiB: 512 tokens in 32 blocks, 4 whole contexts\n" in result.stdout
    assert "no daemon and no card" in size(model, "--runtime-dir", str(daemon.folder)).stdout


def test_a_card_is_filled_as_a_whole(tmp_path):
    machine = FakeMachine(tmp_path, P40)
    done = subprocess.run(
        [*KVD, "size", folder(tmp_path, LLAMA), "--runtime-dir", tmp_path / "none", "--context", "100"],
        env={**os.environ, **machine.environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.endswith("all of Tesla P40, 64 MiB: 512 tokens in 32 blocks, 4 whole contexts\n")
