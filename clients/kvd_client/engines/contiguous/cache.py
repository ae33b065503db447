"""`ContiguousCache`: per layer one growing tensor of keys and one of values, in kvd's memory.

Invariants: of `_sequence`, which is None while nothing is held, the first `num_tokens` are written in every layer and
never written again; behind them each layer has its own length, `_lengths[layer]`, and is written in place.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from kvd.errors import ClientClosed, InvalidRequest, SequenceTooLong
from kvd.layout import KVLayout
from kvd_client.client import Client
from kvd_client.core.verb import Tokens
from kvd_client.engines.contiguous.arrangement import arrangement
from kvd_client.engines.contiguous.usage import MemoryUsage
from kvd_client.memory.tensors import import_torch
from kvd_client.sequence import Sequence

if TYPE_CHECKING:
    import torch

ENGINE = "contiguous/1"
_UNNAMED = "unnamed"
"""The model of caches that share nothing; under it nothing is ever sealed."""


class ContiguousCache:
    """Keys and values of one sequence, up to `max_tokens` tokens a layer. A context manager; one thread at a time.

    Memory is taken from the daemon's pool as the cache grows, block by block and segment by segment, never at once.
    Tensors that it gives out are views: they show what is written later at their places, and zeros after `reset`.
    On a card blocks are not mapped side by side: what is attached is copied once there, as is what outgrows its run.
    """

    def __init__(
        self,
        client: Client,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        layout: str,
        dtype: str | torch.dtype = "float16",
        block_tokens: int | None = None,
        model: str = "",
        positional: str = "",
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """Takes no memory yet.

        `layout` governs every tensor that goes in or comes out: "bhsd" is [batch=1, heads, seq, dim], "hsd" is
        [heads, seq, dim], "hds" is [heads, dim, seq]. `model` names whose KV this is (a digest of the weights, or a
        name with a revision), and with `positional`, `adapter` and `salt` who may share it (see
        `kvd.hashing.Namespace`); without it the cache is private, and `commit` and `attach` are refused.
        `block_tokens` defaults to the fewest from 16 up that give whole pages.

        Raises `InvalidRequest` (an unknown layout), `InvalidLayout` and what `Client.cache` raises.
        """
        self._arrangement = arrangement(layout)
        self._dtype = _torch_dtype(dtype)
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        name = str(self._dtype).removeprefix("torch.")
        if block_tokens is None:
            self._layout = KVLayout.fit(**sizes, dtype=name)
        else:
            self._layout = KVLayout(**sizes, dtype=name, block_tokens=block_tokens)
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}")
        self._max_tokens = max_tokens
        self._is_named = bool(model)
        self._cache = client.cache(
            model=model or _UNNAMED,
            layout=self._layout,
            engine=ENGINE,
            positional=positional,
            adapter=adapter,
            salt=salt,
        )
        self._seq_axis = self._arrangement.seq_axis
        self._num_axes = len(self._arrangement.axes)
        self._lengths = [0] * num_layers
        self._sequence: Sequence | None = None
        self._num_copied_bytes = 0
        self._is_closed = False
        self._capacity = 0
        """Tokens that may be written without asking for memory; 0 while nothing is held."""
        self._writable: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Layer -> keys and values of `_capacity` tokens, as the caller sees them, of layers that may be written behind
        their length. Kept: making them costs as much as a whole update."""

    def __repr__(self) -> str:
        layout = self._layout
        what = (
            f"{layout.num_layers} layers x {layout.num_kv_heads} heads x {layout.head_dim}, {layout.dtype}, "
            f"{self._arrangement}"
        )
        if self._is_closed:
            return f"ContiguousCache({what}, closed)"
        shared = self._sequence.num_sealed_tokens if self._sequence is not None else 0
        return f"ContiguousCache({what}, {self.seq_length()} of {self._max_tokens} tokens, {shared} shared)"

    @property
    def layout(self) -> KVLayout:
        """Sizes and dtype, and how many tokens a block has."""
        return self._layout

    @property
    def max_tokens(self) -> int:
        """Tokens that a layer may ever hold."""
        return self._max_tokens

    @property
    def num_copied_bytes(self) -> int:
        """Bytes copied to attach, to be one tensor on a card, or to reset one layer whose other layers are shared."""
        return self._num_copied_bytes + (self._sequence.num_copied_bytes if self._sequence is not None else 0)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the next tokens of one layer behind what it holds; returns all its keys and values, views.

        Both must have this cache's layout and dtype; the number of tokens is free. Raises `SequenceTooLong` beyond
        `max_tokens`, `OutOfBlocks`, `QuotaExceeded` or `OutOfMemory` when the pool has no more, `InvalidRequest` for
        another shape or dtype: each before anything is changed.
        """
        axis = self._seq_axis
        shape = keys.shape
        fits = (
            shape == values.shape
            and len(shape) == self._num_axes
            and shape == self._arrangement.shape(self._layout, shape[axis])
        )
        if not fits:
            raise self._wrong_shape(keys, values)
        if keys.dtype is not self._dtype or values.dtype is not self._dtype:
            raise InvalidRequest(
                f"the cache holds {self._dtype}, not {keys.dtype} keys and {values.dtype} values: convert them "
                f"knowingly"
            )
        num_new = shape[axis]
        views = self._writable.get(layer)
        if views is None or self._lengths[layer] + num_new > self._capacity:
            views = self._make_writable(layer, self.seq_length(layer) + num_new)
        start = self._lengths[layer]
        stop = start + num_new
        if keys.requires_grad or values.requires_grad:
            # Written with their history they would make the whole cache part of a graph.
            keys, values = keys.detach(), values.detach()
        own_keys, own_values = views
        own_keys.narrow(axis, start, num_new).copy_(keys)
        own_values.narrow(axis, start, num_new).copy_(values)
        self._lengths[layer] = stop
        return own_keys.narrow(axis, 0, stop), own_values.narrow(axis, 0, stop)

    def get(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of one layer; views, of no tokens where nothing is written."""
        length = self.seq_length(layer)
        keys, values = self._writable.get(layer) or self._show(layer)
        return keys.narrow(self._seq_axis, 0, length), values.narrow(self._seq_axis, 0, length)

    def get_all(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`get` of every layer, in order."""
        return [self.get(layer) for layer in range(self._layout.num_layers)]

    def seq_length(self, layer: int | None = None) -> int:
        """Tokens in one layer; without `layer`, in the longest. Raises `InvalidRequest` for a layer there is not."""
        if self._is_closed:
            raise ClientClosed("the cache was closed")
        if layer is None:
            return max(self._lengths)
        if not 0 <= layer < len(self._lengths):
            raise InvalidRequest(f"layer {layer} of {len(self._lengths)}")
        return self._lengths[layer]

    def remaining(self, layer: int | None = None) -> int:
        """Tokens that still fit one layer; without `layer`, the longest."""
        return self._max_tokens - self.seq_length(layer)

    def is_full(self, layer: int | None = None) -> bool:
        """Whether nothing more fits."""
        return self.remaining(layer) == 0

    def memory_usage(self) -> MemoryUsage:
        """Bytes and slots, as they are now."""
        layout = self._layout
        one_token_nbytes = layout.num_kv_heads * layout.head_dim * layout.itemsize
        written_nbytes = sum(self._lengths) * one_token_nbytes
        num_sealed = self._sequence.num_sealed_tokens if self._sequence is not None else 0
        return MemoryUsage(
            keys_nbytes=written_nbytes,
            values_nbytes=written_nbytes,
            shared_nbytes=num_sealed * layout.token_nbytes,
            reserved_nbytes=layout.num_blocks(self._capacity) * layout.block_nbytes,
            num_slots_used=self.seq_length(),
            num_slots=self._max_tokens,
        )

    def attach(self, token_ids: Tokens, *, wait_s: float | None = None) -> int:
        """Resets, then maps the longest prefix of `token_ids` that somebody committed; returns its length in tokens.

        At most len(token_ids) - 1, and a multiple of `layout.block_tokens`; every layer begins with it. `wait_s` as in
        `kvd_client.Cache.sequence`. Raises `InvalidTokens`, `SequenceTooLong`, and what that raises; then nothing is
        held that was not before.
        """
        self._require_named("attach")
        sequence = self._cache.sequence(token_ids, self._max_tokens, wait_s=wait_s)
        self.reset()
        self._hold(sequence)
        self._lengths = [sequence.num_tokens] * len(self._lengths)
        return sequence.num_cached_tokens

    def commit(self, token_ids: Tokens | None = None) -> int:
        """Publishes every full block that is written in all layers; returns how many tokens are published.

        `token_ids` are all ids of the sequence from its start; ids known since `attach` or an earlier commit must be
        equal (`InvalidTokens`), and may be left out. What is published is read-only from then on.
        """
        self._require_named("commit")
        sequence = self._sequence
        if sequence is None:
            return 0
        num_more = min(self._lengths) - sequence.num_tokens
        if num_more < 0:
            # A layer was reset since: what it held is zeros now, and must not be found by anybody.
            return sequence.num_sealed_tokens
        # Where another process was first, its block takes the place of ours: only while no view of it lives.
        self._writable = {}
        sequence.advance(num_more)
        return sequence.commit(token_ids)

    def reset(self, layer: int | None = None) -> None:
        """Forgets one layer, or all: what was private is overwritten with zeros, what was shared is let go of.

        Never fails for want of memory, and gives all of it back when nothing is left.
        """
        self.seq_length(layer)
        if self._sequence is None:
            return
        num_sealed, stop = self._sequence.num_sealed_tokens, self.seq_length(layer)
        if stop > num_sealed:
            private = self._sequence.array(num_sealed, stop)
            (private if layer is None else private[:, layer]).zero_()
            del private
        if layer is not None:
            self._lengths[layer] = 0
            self._writable.pop(layer, None)
        if layer is None or not any(self._lengths):
            self._lengths = [0] * len(self._lengths)
            self._let_go()

    def close(self) -> None:
        """Gives everything back, zeroing nothing; idempotent. Tensors given out keep their bytes until they die."""
        self._is_closed = True
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_writable(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer that may be written from its length to `stop`. All or nothing."""
        if stop > self._max_tokens:
            raise SequenceTooLong(
                f"{stop} tokens do not fit max_tokens={self._max_tokens}; layer {layer} holds {self._lengths[layer]}"
            )
        if self._sequence is None:
            self._hold(self._cache.allocate_sequence(max(stop, 1), self._max_tokens))
        elif self._lengths[layer] < self._sequence.num_tokens:
            self._move(stop)
        elif stop > self._capacity:
            self._sequence.extend(stop)
            self._hold(self._sequence)
        views = self._writable[layer] = self._show(layer)
        return views

    def _move(self, stop: int) -> None:
        """Copies every layer as far as it is written into blocks of our own: one was reset, the others are shared."""
        sequence = self._cache.allocate_sequence(max(stop, *self._lengths), self._max_tokens)
        if self._sequence is not None:
            old, new = self._sequence.array(0, max(self._lengths)), sequence.array(0, max(self._lengths))
            for layer, length in enumerate(self._lengths):
                new[:length, layer].copy_(old[:length, layer])
            self._num_copied_bytes += sum(self._lengths) * (self._layout.token_nbytes // self._layout.num_layers)
            del old, new
        self._let_go()
        self._hold(sequence)

    def _hold(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._capacity = sequence.capacity_tokens
        self._writable = {}

    def _let_go(self) -> None:
        sequence, self._sequence = self._sequence, None
        self._capacity, self._writable = 0, {}
        if sequence is not None:
            self._num_copied_bytes += sequence.num_copied_bytes
            sequence.close()

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `_capacity` tokens of one layer, as the caller sees them."""
        if self._sequence is None:
            none = import_torch().empty(0, self._layout.num_kv_heads, self._layout.head_dim, dtype=self._dtype)
            return self._arrangement.show(none.transpose(0, 1)), self._arrangement.show(none.transpose(0, 1))
        both = self._sequence.array(0, self._capacity).select(1, layer)
        keys, values = (self._arrangement.show(both.select(1, which).transpose(0, 1)) for which in (0, 1))
        return keys, values

    def _require_named(self, verb: str) -> None:
        self.seq_length()
        if not self._is_named:
            raise InvalidRequest(f"this cache is private: to {verb}, name its model with ContiguousCache(model=...)")

    def _wrong_shape(self, keys: torch.Tensor, values: torch.Tensor) -> InvalidRequest:
        layout = self._layout
        return InvalidRequest(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be {self._arrangement} with "
            f"heads={layout.num_kv_heads} and dim={layout.head_dim}"
        )


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Raises `InvalidRequest` for what is no dtype; whether kvd knows it is for `KVLayout` to say."""
    module = import_torch()
    found = getattr(module, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, module.dtype):
        raise InvalidRequest(f"{dtype!r} is not a dtype of torch")
    return cast("torch.dtype", found)
