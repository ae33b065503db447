"""What an engine's KV is named by, and which engines are left alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

from kvd.errors import EngineUnsupported
from kvd_client.engines.vllm import identity
from kvd_client.engines.vllm.identity import Names
from kvd_client.engines.vllm.names import Variant
from kvd_client.engines.vllm.support import layout_of, require_supported
from tests.vllm import configs

HAS_TILES = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
ROPE = {"rope_type": "yarn", "factor": 2.0}


def hf(**fields):
    return configs.HfConfig(**({"model_type": "llama", "rope_theta": 10000.0} | fields))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def namespace(folder, *, model=None, cache=None, rank=0, variant=Variant(), **parts):  # noqa: B008 - frozen
    return Names(configs.engine(folder, **parts), cache or configs.kv_cache(), model=model).namespace(rank, variant)


def test_the_same_engine_has_the_same_name(folder):
    assert namespace(folder) == namespace(folder)


@pytest.mark.parametrize(
    "other",
    [
        {"model_config": {"dtype": torch.float16}},
        {"model_config": {"quantization": "int8"}},
        {"model_config": {"model_impl": "transformers"}},
        {"model_config": {"runner_type": "pooling"}},
        {"model_config": {"hf_config": hf(rope_theta=500000.0)}},
        {"model_config": {"hf_config": hf(rope_parameters=ROPE)}},
        {"model_config": {"hf_config": hf(something_new=1)}},
        {"parallel_config": {"tensor_parallel_size": 2}},
        {"rank": 1},
        {"variant": Variant(adapter="sha256:00")},
        {"variant": Variant(salt="sha256:00")},
        {"model": "weights@2"},
    ],
    ids=str,
)
def test_what_decides_the_kv_names_it(folder, other):  # case A4
    assert namespace(folder, **other) != namespace(folder)


def test_what_decides_where_a_number_lies_in_a_block_names_it(folder):  # case A4
    plain, moved = configs.kv_cache(), configs.kv_cache()
    moved.kv_cache_layout = "HND"
    others = [
        moved,
        configs.kv_cache(layers=["second", "first", "third"]),
        configs.kv_cache(block_size=64),
        configs.kv_cache(dtype=torch.float16),
    ]
    assert len({str(namespace(folder, cache=cache)) for cache in [plain, *others]}) == 5


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (identity.vllm, "__version__", "0.0.1"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "NONE"),
        (torch.cpu, "_is_amx_tile_supported", lambda: not HAS_TILES),
        (identity.platform, "machine", lambda: "other"),
    ],
    ids=["vllm", "instructions", "tiles", "machine"],
)
def test_another_version_of_vllm_or_kernels_for_other_instructions_name_it(folder, monkeypatch, owner, name, other):
    before = namespace(folder)
    monkeypatch.setattr(owner, name, other, raising=False)
    assert namespace(folder) != before


def test_blocks_of_vllm_that_make_up_the_same_block_in_another_way_name_it(folder):
    small = {"layers": ["one"], "num_kv_heads": 1}
    one, other = (configs.kv_cache(block_size=size, **small) for size in (16, 32))
    assert layout_of(one) == layout_of(other)
    assert namespace(folder, cache=one) != namespace(folder, cache=other)


def test_what_decides_nothing_does_not_name_it(folder):
    harmless = hf(transformers_version="9", torch_dtype="float16", _name_or_path="elsewhere", use_cache=False)
    assert namespace(folder, model_config={"hf_config": harmless}) == namespace(folder)
    assert namespace(folder, model_config={"max_model_len": 4096}) == namespace(folder)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su"])
def test_frequencies_that_follow_from_the_longest_prompt_name_it(folder, kind):
    same = hf(rope_parameters={"rope_type": kind})
    one, other = ({"hf_config": copy.copy(same), "max_model_len": most} for most in (512, 1024))
    assert namespace(folder, model_config=one) != namespace(folder, model_config=other)


def test_every_byte_of_the_weights_and_every_file_beside_them_name_it(folder):  # case A4
    names = {namespace(folder)}
    (folder / "model.safetensors").write_bytes(b"other weights")
    names.add(namespace(folder))
    (folder / "consolidated.safetensors").write_bytes(b"more")
    names.add(namespace(folder))
    (folder / "consolidated.safetensors").rename(folder / "last.safetensors")
    names.add(namespace(folder))
    assert len(names) == 4


def test_weights_that_no_file_tells_want_a_name(folder, tmp_path):
    for parts in ({"load_config": {"load_format": "dummy"}}, {"model_config": {"model": str(tmp_path / "none")}}):
        with pytest.raises(EngineUnsupported, match="name them yourself"):
            namespace(folder, **parts)
        assert namespace(folder, model="weights@1", **parts).model == "weights@1"


def test_a_block_is_whole_pages():
    # 3 layers x 2 heads x 2 x 32 of 2 bytes are 768 bytes a token: 32 of them are six pages.
    assert layout_of(configs.kv_cache()).block_tokens == 32
    # One layer with one head: 128 bytes a token, a page holds 32.
    assert layout_of(configs.kv_cache(layers=["one"], num_kv_heads=1, block_size=16)).block_tokens == 32


def spec(kind=FullAttentionSpec, **fields):
    plain = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return kind(**(plain | fields))


class DerivedSpec(FullAttentionSpec):
    """Of a kind that nobody has heard of."""


@pytest.mark.parametrize(
    ("why", "parts"),
    [
        ("kv_load_failure_policy", {"kv_transfer_config": {"kv_load_failure_policy": "fail"}}),
        ("pipeline parallelism", {"parallel_config": {"pipeline_parallel_size": 2}}),
        ("context parallelism", {"parallel_config": {"decode_context_parallel_size": 2}}),
        ("context parallelism", {"parallel_config": {"prefill_context_parallel_size": 2}}),
        ("speculative decoding", {"speculative_config": SimpleNamespace()}),
        ("weights may be changed", {"weight_transfer_config": SimpleNamespace()}),
        ("encoder-decoder", {"model_config": {"is_encoder_decoder": True}}),
        ("lies on cuda", {"device_config": {"device_type": "cuda"}}),
    ],
)
def test_an_engine_that_cannot_be_served_rightly_is_refused(folder, why, parts):
    require_supported(configs.engine(folder), configs.kv_cache())
    with pytest.raises(EngineUnsupported, match=why):
        require_supported(configs.engine(folder, **parts), configs.kv_cache())


@pytest.mark.parametrize(
    ("why", "cache"),
    [
        ("several kinds of cache", {"groups": 2}),
        ("several kinds of cache", {"groups": 0}),
        ("DerivedSpec", {"spec": spec(DerivedSpec)}),
        ("SlidingWindowSpec", {"spec": spec(SlidingWindowSpec, sliding_window=16)}),
        ("sliding window or chunks", {"sliding_window": 16}),
        ("sliding window or chunks", {"attention_chunk_size": 16}),
        ("what follows from the tokens before", {"non_causal": True}),
        ("what follows from the tokens before", {"is_eagle": True}),
        ("what follows from the tokens before", {"tokens_per_state": 2}),
        ("holds float8_e4m3fn", {"dtype": torch.float8_e4m3fn}),
        ("quantized", {"kv_quant_mode": next(mode for mode in KVQuantMode if mode.value)}),
        ("differ in shape, or are packed", {"head_size_v": 16}),
        ("differ in shape, or are packed", {"num_head_slots": 1}),
        ("differ in shape, or are packed", {"state_content_bytes": 128}),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_shared_rightly_is_refused(folder, why, cache):
    with pytest.raises(EngineUnsupported, match=why):
        require_supported(configs.engine(folder), configs.kv_cache(**cache))
