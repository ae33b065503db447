"""`KvdLlamaCache` against the interface of llama-cpp-python 0.3.36: what `Llama` asks of a cache, and gives it.

The package takes 17 minutes to build, so its two classes are stood in for here, with the names, arguments and
attributes they have; xllamacpp stands for the loaded build. `test_llama_cpp_python` runs the real one where it is
installed.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xllamacpp

import kvd_client
from kvd.errors import EngineUnsupported
from tests.support.daemon import running_daemon

NUM_VOCAB = 50
MAX_TOKENS = 400
assert xllamacpp


class LlamaState:
    """llama_cpp.LlamaState."""

    def __init__(
        self, input_ids: Any, scores: Any, n_tokens: int, llama_state: bytes, llama_state_size: int, seed: int
    ) -> None:
        self.input_ids, self.scores, self.n_tokens = input_ids, scores, n_tokens
        self.llama_state, self.llama_state_size, self.seed = llama_state, llama_state_size, seed


class ContextParams(ctypes.Structure):
    """Some of llama_cpp.llama_context_params."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("rope_freq_base", ctypes.c_float),
        ("abort_callback", ctypes.c_void_p),
    )


class Llama:
    """What a cache looks at of llama_cpp.Llama."""

    def __init__(self, model: Path, *, logits_all: bool = False, lora_path: str | None = None, **params: Any) -> None:
        self.model_path, self.lora_path, self.lora_base, self.lora_scale = str(model), lora_path, None, 1.0
        self.kv_overrides = None
        self._logits_all = logits_all
        self.context_params = ContextParams(n_ctx=MAX_TOKENS, **params)

    def n_vocab(self) -> int:
        return NUM_VOCAB

    def n_ctx(self) -> int:
        return MAX_TOKENS


def state_of(tokens: list[int], content: bytes = b"state") -> LlamaState:
    """As `Llama.save_state` makes it: ids as long as the context, logits of every token."""
    ids = np.full(MAX_TOKENS, 7, dtype=np.intc)
    ids[: len(tokens)] = tokens
    scores = np.ones((len(tokens), NUM_VOCAB), dtype=np.single)
    return LlamaState(ids, scores, len(tokens), content + b"rest of the buffer", len(content), 42)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights " + tmp_path.name.encode())
    return path


@pytest.fixture
def cache_of(client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    module = types.ModuleType("llama_cpp")
    module.LlamaState = LlamaState  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    from kvd_client.engines.llama_cpp import KvdLlamaCache

    return lambda llama, **options: KvdLlamaCache(client, llama, **options)


def prompt(num: int, other_from: int | None = None) -> list[int]:
    start = num if other_from is None else other_from
    return [*range(start), *(place + 1000 for place in range(start, num))]


def test_a_hit_gives_the_state_back_and_forgets_nothing(cache_of, model):
    cache = cache_of(Llama(model))
    cache[prompt(100)] = state_of(prompt(99))
    for _ in range(2):
        assert prompt(200) in cache
        found = cache[prompt(200)]
        assert (found.n_tokens, found.seed, found.llama_state_size) == (99, 42, 5)
        assert bytes(found.llama_state) == b"state"
        assert (ctypes.c_uint8 * 5).from_buffer_copy(found.llama_state)[:] == list(b"state"), "as load_state does"
        assert found.input_ids.tolist()[:99] == prompt(99)
        assert len(found.input_ids) == MAX_TOKENS
        del found


def test_the_logits_are_not_kept(cache_of, model):
    cache = cache_of(Llama(model))
    cache[prompt(99)] = state_of(prompt(99))
    found = cache[prompt(99)]
    scores = np.ones((512, NUM_VOCAB), dtype=np.single)
    scores[: found.n_tokens, :] = found.scores.copy()  # as load_state does
    assert not scores[:99].any()
    assert scores[99:].all()
    del found


def test_no_state_is_a_key_error(cache_of, model):
    cache = cache_of(Llama(model))
    assert prompt(100) not in cache
    with pytest.raises(KeyError):
        cache[prompt(100)]


def test_the_longest_common_state_is_taken(cache_of, model):  # case E6
    cache = cache_of(Llama(model))
    cache[prompt(70)] = state_of(prompt(70), b"short")
    cache[prompt(300)] = state_of(prompt(300), b"longer")
    cache[prompt(300, 200)] = state_of(prompt(300, 200), b"other")
    assert bytes(cache[prompt(350)].llama_state) == b"longer"
    assert bytes(cache[prompt(350, 200)].llama_state) == b"other"
    assert bytes(cache[prompt(350, 250)].llama_state) == b"longer"


def other_model(model: Path, _llama: Llama) -> Llama:
    path = model.with_name("other.gguf")
    path.write_bytes(model.read_bytes()[:-1] + b"!")
    return Llama(path)


def adapted(model: Path, _llama: Llama) -> Llama:
    path = model.with_name("adapter.gguf")
    path.write_bytes(b"adapter")
    return Llama(model, lora_path=str(path))


def overridden(model: Path, llama: Llama, **attributes: Any) -> Llama:
    other = Llama(model, lora_path=llama.lora_path)
    vars(other).update(attributes)
    return other


@pytest.mark.parametrize(
    "other",
    [
        other_model,
        adapted,
        lambda model, _: Llama(model, type_k=8),
        lambda model, _: Llama(model, type_v=8),
        lambda model, _: Llama(model, rope_freq_base=5.0),
        lambda model, llama: overridden(model, llama, lora_scale=0.5),
        lambda model, llama: overridden(model, llama, kv_overrides={"llama.rope.freq_base": 5.0}),
    ],
)
def test_other_weights_adapters_dtypes_and_positions_find_nothing(cache_of, model, other):  # case E5
    llama = Llama(model)
    cache_of(llama)[prompt(100)] = state_of(prompt(100))
    assert prompt(100) in cache_of(Llama(model, n_threads=3, n_batch=9)), "these change nothing"
    assert prompt(100) not in cache_of(other(model, llama))


def test_another_build_finds_nothing(cache_of, model, monkeypatch):  # case E5
    cache_of(Llama(model))[prompt(100)] = state_of(prompt(100))
    monkeypatch.setattr("kvd_client.engines.llama_cpp.python_cache.build_digest", lambda: "another")
    assert prompt(100) not in cache_of(Llama(model))


def test_salts_keep_apart(cache_of, model):
    cache_of(Llama(model), salt="a")[prompt(100)] = state_of(prompt(100))
    assert prompt(100) not in cache_of(Llama(model), salt="b")


def test_a_state_under_a_wrong_key_is_refused(cache_of, model):
    cache = cache_of(Llama(model))
    cache[prompt(100)] = state_of(prompt(100))
    from kvd.hashing import encode_tokens
    from kvd_client.engines.llama_cpp.python_cache import _HEAD
    from kvd_client.engines.llama_cpp.snapshots import _keys

    wrong = encode_tokens(prompt(100, 10))
    blobs = cache._snapshots._blobs
    blobs.put(_keys(encode_tokens(prompt(100)))[-1], [_HEAD.pack(100, 0, 5), wrong, b"state"], replace=True)
    with pytest.raises(KeyError):
        cache[prompt(100)]
    right, too_long = (encode_tokens(prompt(num)) for num in (100, MAX_TOKENS + 1))
    for content in (
        b"too short",
        _HEAD.pack(100, 0, 6) + right + b"state",
        _HEAD.pack(101, 0, 5) + right + b"state",
        _HEAD.pack(MAX_TOKENS + 1, 0, 5) + too_long + b"state",
    ):
        blobs.put(_keys(right)[-1], content, replace=True)
        with pytest.raises(KeyError):
            cache[prompt(100)]


def test_models_that_want_all_logits_are_refused(cache_of, model):
    with pytest.raises(EngineUnsupported):
        cache_of(Llama(model, logits_all=True))


def test_a_daemon_that_goes_away_makes_misses(tmp_path, model, cache_of, monkeypatch):
    from kvd_client.engines.llama_cpp import KvdLlamaCache

    with (
        running_daemon(tmp_path, budget="64MiB", segment="4MiB") as daemon,
        kvd_client.connect(daemon.folder) as client,
    ):
        cache = KvdLlamaCache(client, Llama(model))
        cache[prompt(100)] = state_of(prompt(100))
        assert cache.cache_size > 0
        daemon.stop()
        assert prompt(100) not in cache
        with pytest.raises(KeyError):
            cache[prompt(100)]
        cache[prompt(100)] = state_of(prompt(100))
        assert cache.cache_size == 0
        daemon.start()
        assert prompt(100) not in cache, "another memory"
        cache[prompt(100)] = state_of(prompt(100))
        assert prompt(100) in cache
