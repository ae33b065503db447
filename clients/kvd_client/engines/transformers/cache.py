"""`KvdCache`: a transformers cache that lies in a kvd sequence.

Shared prefix and private tail are one mapped range, so a layer's keys are one view, whoever computed them. The cache
checks that every forward pass is the next step of its own tokens (`guard` tells it which tokens those are) before a
byte is written.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence as Tokens
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, KvdError
from kvd_client.engines.transformers.support import require_shape
from kvd_client.sequence import Sequence

_FOREIGN_MODEL = (
    "this KvdCache belongs to another model, or the model's own forward was bypassed: attach one cache for each model "
    "and call the model itself"
)
_log = logging.getLogger(__name__)


class KvdLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `KvdCache`. Keys and values are views into the sequence, [1, num_kv_heads, tokens, head_dim]."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    is_initialized = True
    batch_size = 1

    def __init__(self, cache: KvdCache, index: int) -> None:
        # Not the base class's: it would assign keys and values, which here are asked for each time, so that no view
        # outlives the forward pass that needed it and keeps a closed sequence mapped.
        self._cache = cast("KvdCache", weakref.proxy(cache))
        self._index = index

    @property
    def keys(self) -> torch.Tensor:
        """A view of the layer's keys."""
        return self._cache.layer_states(self._index)[0]

    @property
    def values(self) -> torch.Tensor:
        """A view of the layer's values."""
        return self._cache.layer_states(self._index)[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step's keys and values behind the layer's, in place; returns views of all of them."""
        self._cache.write(self._index, key_states, value_states)
        return self._cache.layer_states(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of what a step of `query_length` tokens attends to."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens in this layer."""
        return self._cache.sequence.num_tokens_in(self._index)

    def get_max_length(self) -> int:
        """Tokens the sequence may ever hold."""
        return self._cache.sequence.max_tokens


class Guarded(Protocol):
    """The model a cache was attached for, as far as the cache needs it; `guard.GuardedModel`."""

    def put_on(self) -> None:
        """Puts the checks onto the model, which then calls `begin_step` and `end_step`."""

    def take_off(self) -> None:
        """Takes one cache's checks off."""

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether this is the very module whose KV the cache holds."""

    def is_unchanged(self) -> bool:
        """Whether weights and adapters are still those that the namespace names."""


class KvdCache(Cache):  # type: ignore[misc]
    """The KV of one sequence of one model, for `generate(input_ids, cache=...)`. Made by `attach`; a context manager.

    Holds one sequence: batches, beams and assisted decoding are refused. `copy.copy` and `copy.deepcopy` fork it: the
    copy shares the sealed blocks and owns its tail. After `generate` it holds one token fewer than the sequence that
    came back, since nothing was computed for the last one. One thread at a time.
    """

    def __init__(self, sequence: Sequence, model: Guarded, *, publish: bool = True) -> None:
        """Puts the checks onto `model`. With `publish` every step that completes a block commits it."""
        super().__init__(layers=[KvdLayer(self, index) for index in range(sequence.layout.num_layers)])
        self.sequence = sequence
        self.publish_error: KvdError | None = None
        self._publish = publish
        self._model = model
        self._step: list[int] | None = None
        self._step_start = 0
        self._step_began_s = 0.0
        self._is_guarded = True
        model.put_on()

    def __repr__(self) -> str:
        if self.sequence.closed:
            return "KvdCache(closed)"
        return f"KvdCache({self.sequence.num_tokens} tokens, {self.num_cached_tokens} of them found)"

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found and not computed: a multiple of block_tokens, at most the prompt - 1."""
        return self.sequence.num_cached_tokens

    @property
    def num_copied_bytes(self) -> int:
        """Bytes that attaching copied; 0 where everything was mapped."""
        return self.sequence.num_copied_bytes

    def commit(self) -> int:
        """Publishes every full block computed so far and returns how many tokens are published. With `publish` (the
        default) each step has done so already; an error it met then is raised here.
        """
        if self.publish_error is not None:
            raise self.publish_error
        return self.sequence.commit()

    def close(self) -> None:
        """Gives everything back and takes the checks off the model; idempotent."""
        if self._is_guarded:
            self._is_guarded = False
            self._model.take_off()
        self.sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_step(
        self, decoder: torch.nn.Module, token_ids: Tokens[int], positions: torch.Tensor | None = None
    ) -> None:
        """Takes the tokens of the forward pass that starts now. Raises `InvalidRequest`, `EngineUnsupported` or
        `ClientClosed`, with nothing changed, unless they are what comes next.

        `positions` are the pass's position ids, if it has any: [..., n].
        """
        self._require_open()
        if not self._model.is_decoder(decoder):
            raise EngineUnsupported(_FOREIGN_MODEL)
        start, known = self.sequence.num_tokens, self.sequence.token_ids
        stop = start + len(token_ids)
        if len(known) < start or any(self.sequence.num_tokens_in(index) != start for index in range(len(self.layers))):
            raise InvalidRequest(
                "an earlier forward pass over this KvdCache stopped half way; close it and attach again"
            )
        if start < len(known) < stop:
            # A whole prompt fed to a cache that holds its beginning would end here too.
            raise InvalidRequest(
                f"{len(token_ids)} tokens were passed, but {start} of the prompt's {len(known)} are cached: "
                f"{len(known) - start} are left to compute"
            )
        if start < len(known) and known[start:stop] != list(token_ids):
            raise InvalidRequest(f"the tokens at {start}..{stop} are not those this KvdCache was attached for")
        if positions is not None and not _counts_up(positions, start, stop):
            raise InvalidRequest(
                f"the position ids of these tokens must be {start}..{stop}: padding, or only new tokens without the "
                f"attention mask of the whole sequence, would put their keys at wrong places"
            )
        # Half a millisecond for hundreds of tensors: too much for every generated token.
        if len(token_ids) > 1 and not self._model.is_unchanged():
            raise EngineUnsupported(
                "the model's weights or adapters changed since this KvdCache was attached; close it and attach again"
            )
        self._step, self._step_start = list(token_ids), start
        self._step_began_s = time.monotonic()

    def end_step(self) -> None:
        """The forward pass is complete: its tokens get their names, and blocks that became full are published."""
        step, self._step = self._step, None
        if step is None:
            return
        stop = self._step_start + len(step)
        for index in range(len(self.layers)):
            if self.sequence.num_tokens_in(index) != stop:
                raise EngineUnsupported(f"the forward pass did not use layer {index} of the cache")
        if len(self.sequence.token_ids) < stop:
            self.sequence.add_tokens(step)
        self.sequence.computed(len(step), time.monotonic() - self._step_began_s)
        block_tokens = self.sequence.layout.block_tokens
        if (
            self._publish
            and self.publish_error is None
            and stop // block_tokens > self.sequence.num_sealed_tokens // block_tokens
        ):
            self._publish_blocks()

    def _require_open(self) -> None:
        if self.sequence.closed:
            raise ClientClosed("this KvdCache was closed; attach again")

    def _publish_blocks(self) -> None:
        try:
            self.sequence.commit()
        except KvdError as error:
            # What is mapped stays good without the daemon, so a generation under way goes on.
            self.publish_error = error
            _log.warning("kvd: these blocks are not published: %s", error)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the step's keys and values [1, num_kv_heads, n, head_dim] of one layer."""
        self._require_open()
        if self._step is None:
            raise EngineUnsupported(_FOREIGN_MODEL)
        require_shape(self.sequence.layout, keys, values)
        if self.sequence.num_tokens_in(index) != self._step_start or keys.shape[2] != len(self._step):
            raise EngineUnsupported(f"layer {index} wrote twice, or other tokens than the pass was given")
        self.sequence.append(index, keys[0], values[0])

    def layer_states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, views [1, num_kv_heads, tokens, head_dim]."""
        keys, values = self.sequence.layer(index)
        return keys[None], values[None]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. Raises `InvalidRequest` for a positive count, or too many."""
        num_left = self.sequence.num_tokens + tokens_to_remove
        if tokens_to_remove > 0 or num_left < 0:
            raise InvalidRequest(
                f"crop takes the number of tokens to remove as -{self.sequence.num_tokens} .. 0, not {tokens_to_remove}"
            )
        if tokens_to_remove:
            self.sequence.truncate(num_left)

    def reset(self) -> None:
        """Removes every token."""
        self.crop(-self.sequence.num_tokens)

    def fork(self) -> KvdCache:
        """Another cache with the same tokens: sealed blocks are shared, the rest is copied at once."""
        return KvdCache(self.sequence.fork(), self._model, publish=self._publish)

    def __copy__(self) -> KvdCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KvdCache:
        memo[id(self)] = copy = self.fork()
        return copy

    def __reduce__(self) -> NoReturn:
        raise EngineUnsupported(
            "a KvdCache is memory of this process and cannot be pickled; attach in the other process"
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: `EngineUnsupported`."""
        raise EngineUnsupported("beam search reorders rows, and a KvdCache holds one sequence; use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused, except for one repeat: `EngineUnsupported`."""
        if repeats != 1:
            raise EngineUnsupported(f"a KvdCache holds one sequence and cannot become {repeats}; fork() it instead")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: `EngineUnsupported`."""
        raise EngineUnsupported("a KvdCache holds one sequence; there are no rows to select")

    def activate_past_recording(self) -> None:
        """Refused: `EngineUnsupported`. Assisted decoding asks for this, then feeds the whole prompt again."""
        raise EngineUnsupported("assisted decoding over a KvdCache is not served; generate without an assistant")


def _counts_up(positions: torch.Tensor, start: int, stop: int) -> bool:
    expected = torch.arange(start, stop, device=positions.device)
    return positions.shape[-1] == stop - start and bool((positions == expected).all())
