"""`KvdLlamaCache`: the cache interface of llama-cpp-python over shared snapshots."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.errors import EngineUnsupported, KvdError
from kvd.hashing import TOKEN_NBYTES, encode_tokens
from kvd_client.client import Client
from kvd_client.engines.llama_cpp.identity import build_digest, options_digest, set_name, weights_digest
from kvd_client.engines.llama_cpp.snapshots import Snapshots, num_common_tokens

if TYPE_CHECKING:
    _Base = object
else:
    try:
        from llama_cpp.llama_cache import BaseLlamaCache as _Base
    except ImportError:
        # Without it nobody can call this class either; the module is still imported for what else is in the package.
        _Base = object

FAMILY = "llama-cpp-python/1"
_HEAD = struct.Struct("<QQQ")  # tokens, seed, bytes of the state
_HARMLESS_PARAMS = frozenset({"n_batch", "n_ubatch", "n_threads", "n_threads_batch", "no_perf", "embeddings"})
"""Fields of the context's parameters that say nothing about what a state holds, nor how it is laid out."""
_log = logging.getLogger(__name__)


class KvdLlamaCache(_Base):
    """States of one `llama_cpp.Llama`, shared by every process with the same weights, build and options.

        llama.set_cache(KvdLlamaCache(client, llama))

    Unlike the caches of llama-cpp-python it forgets nothing on a hit, takes the state with the longest common prefix
    wherever that ends, and stores no logits: 20 MB instead of 120 for 900 tokens. Logits are computed anew for the last
    token, so `logprobs` of *prompt* tokens are not served (`logits_all` models are refused). One thread, as `Llama`.

    A daemon that is away, full or restarted makes misses, never errors. Raises `EngineUnsupported` for a model whose
    states cannot be told from others'.
    """

    def __init__(self, client: Client, llama: Any, *, salt: str = "") -> None:
        """Reads the weights' digest (once per file, then remembered). `salt` separates what should be kept apart."""
        if getattr(llama, "_logits_all", False):
            raise EngineUnsupported("a model with logits_all=True wants logits of cached tokens, which are not stored")
        self.capacity_bytes = 0
        """Not used: the daemon decides how much is kept."""
        self._num_vocab: int = llama.n_vocab()
        self._max_tokens: int = llama.n_ctx()
        self._client = client
        model = Path(llama.model_path)
        self._snapshots = Snapshots(
            client.blobs(
                set_name(
                    FAMILY,
                    model,
                    weights=weights_digest(model),
                    build=build_digest(),
                    options=options_digest(_options(llama)),
                ),
                salt=salt,
            )
        )

    @property
    def cache_size(self) -> int:
        """Bytes of all memory in the daemon's pools; 0 when it cannot be asked."""
        try:
            return self._client.status().memory.used_nbytes
        except KvdError:
            return 0

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether some state has a prefix in common with these tokens."""
        try:
            return self._snapshots.longest(encode_tokens(key)) > 0
        except KvdError as error:
            _miss("look for", error)
            return False

    def __getitem__(self, key: Sequence[int]) -> Any:
        """A `LlamaState` with the longest common prefix. Raises `KeyError` when there is none, or no daemon."""
        tokens = encode_tokens(key)
        try:
            found = self._snapshots.find(tokens)
        except KvdError as error:
            _miss("look for", error)
            found = None
        state = None if found is None else self._unpack(found.state, tokens, found.num_tokens)
        if state is None:
            raise KeyError("no state with a common prefix")
        return state

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Keeps a state that `Llama.save_state` made; a copy, without its logits."""
        num_tokens = int(value.n_tokens)
        # The state's own tokens count, not the key: the last token of a completion has no keys and values yet.
        tokens = encode_tokens(value.input_ids[:num_tokens])
        state = memoryview(value.llama_state)[: value.llama_state_size]
        head = _HEAD.pack(num_tokens, int(value.seed) & (1 << 64) - 1, len(state))
        try:
            self._snapshots.save(tokens, [head, tokens, state])
        except KvdError as error:
            _miss("keep", error)

    def _unpack(self, content: memoryview, tokens: bytes, num_common: int) -> Any:
        """The state, None when it is not what was looked for."""
        if len(content) < _HEAD.size:
            return None
        num_tokens, seed, state_nbytes = _HEAD.unpack_from(content)
        start = _HEAD.size + num_tokens * TOKEN_NBYTES
        if num_tokens > self._max_tokens or len(content) != start + state_nbytes:
            return None
        stored = content[_HEAD.size : start]
        if num_common_tokens(stored, tokens) < num_common:
            _log.error("a state has other tokens than it is kept under; it is not used")
            return None
        return _llama_state(stored, content[start:], seed, self._num_vocab, self._max_tokens)


def _llama_state(stored: memoryview, state: memoryview, seed: int, num_vocab: int, max_tokens: int) -> Any:
    import numpy as np
    from llama_cpp import LlamaState

    num_tokens = len(stored) // TOKEN_NBYTES
    # As long as the context: `load_state` makes it the model's own buffer, which later tokens are written to. Places
    # without a token hold none that a prompt could have.
    input_ids = np.full(max_tokens, -1, dtype=np.intc)
    input_ids[:num_tokens] = np.frombuffer(stored, dtype="<u4").astype(np.intc)
    return LlamaState(
        input_ids=input_ids,
        scores=np.zeros((1, num_vocab), dtype=np.single),  # load_state spreads it over all rows
        n_tokens=num_tokens,
        llama_state=state,  # not copied here: load_state copies it
        llama_state_size=len(state),
        seed=seed,
    )


def _options(llama: Any) -> list[str]:
    """Everything the caller chose that changes what a token's keys and values are, or how they are written."""
    params = llama.context_params
    options = [
        f"{name}={value!r}"
        for name, *_ in params._fields_
        if name not in _HARMLESS_PARAMS and isinstance(value := getattr(params, name), (bool, int, float))
    ]
    options.append(f"kv_overrides={getattr(llama, 'kv_overrides', None)!r}")
    options += [f"{name}={getattr(llama, name, None)}" for name in ("lora_base", "lora_path", "lora_scale")]
    return options


def _miss(what: str, error: KvdError) -> None:
    _log.warning("kvd cannot %s a state just now, llama.cpp computes: %s", what, error)
