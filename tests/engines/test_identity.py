"""The namespace of a model: equal for equal KV, different as soon as the KV could differ."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvd.hashing import namespace_digest
from kvd_client.engines.transformers import model_identity, namespace
from kvd_client.engines.transformers.weights import SAMPLES_PER_TENSOR, file_digest, weight_files
from tests.engines.adapters import adapted
from tests.engines.tiny import tiny_model

RECORD = ".model.safetensors.kvd-sha256"


def digest(model: PreTrainedModel, **arguments: Any) -> bytes:
    return namespace_digest(namespace(model, **arguments), "tenant")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


# case A4
@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 1024},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_weights_heads_rope_or_settings_are_another_namespace(other: dict[str, Any]) -> None:
    assert digest(tiny_model(**other)) != digest(tiny_model())


class OnCard(torch.Tensor):
    """Holds bytes that the CPU cannot read, as a tensor on a card does."""

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("has_files", [True, False])
def test_a_model_on_a_card_has_the_name_it_has_on_the_cpu(saved: Path, has_files: bool) -> None:
    def loaded() -> PreTrainedModel:
        return load(saved) if has_files else tiny_model()

    on_card = loaded()
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in on_card.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in [item for item in tensors.items() if item[1] is not None]:
                tensors[name] = moved.setdefault(tensor, tensor.detach().as_subclass(OnCard))
    assert {type(tensor) for tensor in moved.values()} == {OnCard}
    assert digest(on_card) == digest(loaded())


# case A4
def test_another_dtype_block_size_or_salt_is_another_namespace() -> None:
    model = tiny_model()
    digests = [digest(model), digest(model, block_tokens=32), digest(model, salt="a"), digest(tiny_model().half())]
    assert len(set(digests)) == 4


def test_equal_random_models_share_a_namespace() -> None:
    assert digest(tiny_model()) == digest(tiny_model())


def test_settings_that_leave_kv_alone_share_a_namespace() -> None:
    assert digest(tiny_model(attention="eager", eos_token_id=5, use_cache=False)) == digest(tiny_model())


# case A4
def test_rope_edited_after_the_model_was_built_counts_as_it_computes() -> None:
    edited = tiny_model()
    edited.model.rotary_emb.inv_freq.mul_(0.5)
    assert digest(edited) != digest(tiny_model())


# case A4
def test_rope_edited_after_the_namespace_was_known_counts_as_well() -> None:
    model = tiny_model()
    before = digest(model)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert digest(model) != before


# case A4
def test_the_scale_that_rope_gives_to_attention_counts() -> None:
    scaled = tiny_model()
    scaled.model.rotary_emb.attention_scaling = 2.0
    assert digest(scaled) != digest(tiny_model())


def test_a_model_made_in_inference_mode_has_a_namespace() -> None:
    with torch.inference_mode():
        model = tiny_model()
    assert digest(model) == digest(tiny_model())


def test_rope_parameters_of_any_length_fit() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "notes": ["long"] * 1000}
    assert digest(tiny_model(rope_parameters=rope)) != digest(tiny_model())


# case A4
def test_a_rope_that_shows_in_its_parameters_only_is_another_namespace() -> None:
    named = tiny_model()
    named.config.rope_parameters = {**named.config.rope_parameters, "attention_factor": 2.0}
    assert digest(named) != digest(tiny_model())


# case A4
def test_a_model_changed_in_memory_is_another_namespace_although_its_files_are_the_same(saved: Path) -> None:
    model = load(saved)
    before = digest(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    assert digest(model) != before
    assert digest(load(saved)) == before


def test_a_model_made_from_a_folders_configuration_alone_is_not_the_folders_model(saved: Path) -> None:
    torch.manual_seed(7)
    fresh = AutoModelForCausalLM.from_config(load(saved).config).eval()
    assert weight_files(fresh) == weight_files(load(saved)) == [saved / "model.safetensors"]
    assert digest(fresh) != digest(load(saved))


# case A4
def test_without_files_every_number_of_the_weights_counts() -> None:
    """Of a model from a file only samples do, beside the file."""
    model = tiny_model()
    before = digest(model)
    flat = model.model.layers[0].mlp.up_proj.weight.detach().view(-1)
    assert len(flat) > 2 * SAMPLES_PER_TENSOR
    flat[1] += 1
    assert digest(model) != before


def of_folder(folder: Path, **settings: Any) -> Any:
    """A model that says it was loaded from there."""
    return SimpleNamespace(config=SimpleNamespace(_name_or_path=str(folder), **settings))


# case A4
def test_weights_whose_files_are_not_certain_have_none(tmp_path: Path) -> None:
    """All their bytes count then. One of two files may be another model; one of which a part is gone is not all."""
    assert weight_files(of_folder(tmp_path)) == []
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.touch()
    assert weight_files(of_folder(tmp_path)) == [one]
    two.touch()
    assert weight_files(of_folder(tmp_path)) == []
    assert weight_files(of_folder(tmp_path, quantization_config={"gguf_file": "two.gguf"})) == [two]
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (tmp_path / "model-1.safetensors").touch()
    assert weight_files(of_folder(tmp_path)) == []
    (tmp_path / "model-2.safetensors").touch()
    assert weight_files(of_folder(tmp_path)) == [tmp_path / name for name in sorted(parts.values())]


def test_files_are_read_once_and_remembered_beside_them(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(load(saved))
    assert (saved / RECORD).exists()
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("the file was read again"))
    assert digest(load(saved)) == first


def test_a_read_only_folder_is_remembered_in_the_users_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder in the record's place refuses it for root too, whom permissions don't stop.
    (saved / RECORD).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = file_digest(saved / "model.safetensors")
    assert len(list((tmp_path / "cache" / "kvd" / "weights").iterdir())) == 1
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("the file was read again"))
    assert file_digest(saved / "model.safetensors") == first


# case A4
@pytest.mark.parametrize("keep_size", [True, False])
def test_a_changed_file_is_read_again(saved: Path, keep_size: bool) -> None:
    path = saved / "model.safetensors"
    before, modified_ns = file_digest(path), path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if keep_size else content + b"\0")
    # Size and time alone are looked at, and each of them is enough.
    os.utime(path, ns=(1, modified_ns + 1 if keep_size else modified_ns))
    assert file_digest(path) != before


@pytest.mark.parametrize("rubbish", [b"", b"{}", b"\xff\xfe", b'{"nbytes":1,"mtime_ns":1,"sha256":"00"}'])
def test_a_spoilt_record_is_ignored(saved: Path, rubbish: bytes) -> None:
    path = saved / "model.safetensors"
    before = file_digest(path)
    (saved / RECORD).write_bytes(rubbish)
    assert file_digest(path) == before


def test_nowhere_to_remember_is_no_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / RECORD).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert len(file_digest(saved / "model.safetensors")) == 64


def test_a_user_without_a_home_remembers_beside_the_file_or_nowhere(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert len(file_digest(saved / "model.safetensors")) == 64
    assert (saved / RECORD).is_file()
    (saved / RECORD).unlink()
    (saved / RECORD).mkdir()
    assert len(file_digest(saved / "model.safetensors")) == 64


# case A5
def test_the_same_adapter_name_with_other_content_is_another_namespace() -> None:
    one, same, other = adapted(), adapted(), adapted(scale=0.2)
    assert model_identity(one).adapter == model_identity(same).adapter != model_identity(other).adapter
    assert digest(one) != digest(other)
    assert model_identity(tiny_model()).adapter == ""


# case A5
def test_an_adapter_that_is_switched_off_or_scaled_is_another_namespace() -> None:
    model = adapted()
    on = digest(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj.disable_adapters = True
    off = digest(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj.disable_adapters, layer.self_attn.q_proj.scaling = False, {"french": 2.0}
    assert len({on, off, digest(model)}) == 3


# case A1
def test_the_order_of_a_set_in_an_adapters_settings_does_not_matter() -> None:
    one, two = {0, 8}, {8, 0}
    assert list(one) != list(two)
    adapters = [model_identity(adapted(settings={"r": 2, "layers": layers})).adapter for layers in (one, two)]
    assert adapters[0] == adapters[1]


# case A5
def test_other_adapter_settings_are_another_namespace() -> None:
    assert digest(adapted(settings={"r": 2, "lora_alpha": 1})) != digest(adapted(settings={"r": 2, "lora_alpha": 8}))
