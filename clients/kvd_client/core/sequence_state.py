"""What a sequence knows and does without asking the daemon: counts, names, views, writing in place.

Invariants, by place (a block's index in the sequence): places below `num_sealed` hold sealed blocks that this session
references once each, mapped read-only; the rest hold blocks reserved by this session, mapped writable. `blocks[place]`
stands for the place's hash; `_own_copies[place]` is our own duplicate where that one is still mapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.errors import ClientClosed, ForkedClient, InvalidRequest, InvalidTokens, SequenceTooLong
from kvd.hashing import TOKEN_NBYTES, encode_tokens
from kvd_client.arguments import whole_number
from kvd_client.core.named_tokens import NamedTokens
from kvd_client.core.verb import Tokens
from kvd_client.memory.checksum import first_corrupt
from kvd_client.memory.storage import Storage
from kvd_client.memory.tensors import import_torch
from kvd_client.session.link import Link
from kvd_client.session.opened_cache import OpenedCache

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOptions:
    """How a sequence lies in memory; its forks inherit it."""

    materialize: bool
    populate: bool
    checksums: bool


class SequenceState:
    """The local half of `SequenceCore`. No thread is excluded: the sequence that wraps it does that."""

    def __init__(
        self, link: Link, cache: OpenedCache, names: NamedTokens, *, max_tokens: int, options: SequenceOptions
    ) -> None:
        self.link = link
        self.layout = cache.namespace.layout
        self.max_tokens = max_tokens
        self.num_cached_tokens = 0
        self.is_closed = False
        self._cache = cache
        self._options = options
        self._names = names
        self._blocks: list[BlockId] = []
        self._own_copies: dict[int, BlockId] = {}
        self._num_sealed = 0
        self._written = [0] * self.layout.num_layers
        self._num_copied_bytes = 0
        self._storage: Storage

    @property
    def num_tokens(self) -> int:
        """Written in all layers."""
        return min(self._written)

    def num_tokens_in(self, layer: int) -> int:
        """Written in one layer."""
        self._require_layer(layer)
        return self._written[layer]

    @property
    def num_named_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self._names)

    @property
    def num_sealed_tokens(self) -> int:
        """Leading tokens in sealed blocks."""
        return self._num_sealed * self.layout.block_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that blocks are held for, within `max_tokens`."""
        return min(self.max_tokens, len(self._blocks) * self.layout.block_tokens)

    @property
    def num_copied_bytes(self) -> int:
        """Bytes copied to attach, fork or fall back."""
        return self._num_copied_bytes + self._storage.num_copied_bytes

    @property
    def is_private(self) -> bool:
        """Whether the blocks were copied instead of mapped."""
        return self._storage.is_private

    @property
    def token_ids(self) -> list[int]:
        """The ids known so far."""
        return self._names.ids()

    def add_tokens(self, token_ids: Tokens) -> None:
        """Names the tokens that follow those known."""
        self._require_open()
        tokens = encode_tokens(token_ids)
        self._require_fits(len(self._names) + len(tokens) // TOKEN_NBYTES)
        self._names.add(tokens)

    def num_matching_tokens(self, token_ids: Tokens) -> int:
        """Length of the common prefix of ids."""
        return self._names.num_matching(token_ids)

    def require_prefix_of(self, token_ids: Tokens) -> None:
        """Raises `InvalidTokens` unless what is held here is held for a prefix of `token_ids`."""
        held = max(self._written)
        if held > len(self._names):
            raise InvalidTokens(f"{held} tokens are written but only {len(self._names)} are named")
        matching = self._names.num_matching(token_ids)
        if matching < held:
            raise InvalidTokens(f"the sequence holds {held} tokens; only the first {matching} are the prompt's")

    def require_complete(self) -> None:
        """Raises `InvalidRequest` when a named token is not written in every layer."""
        if self.num_tokens < len(self._names):
            raise InvalidRequest(f"{len(self._names)} tokens are named but {self.num_tokens} are written in all layers")

    def missing_tokens(self, layer: int) -> tuple[int, int]:
        """The named tokens that one layer lacks, as (start, stop)."""
        self._require_open()
        self._require_layer(layer)
        return self._written[layer], max(self._written[layer], len(self._names))

    def parts(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values written in one layer, a pair for each part they lie in."""
        self._require_open()
        self._require_layer(layer)
        return self._storage.parts(layer, self._written[layer])

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values written in one layer, in one part from now on."""
        self._require_open()
        self._require_layer(layer)
        self._gather(0, self._written[layer])
        (both,) = self._storage.parts(layer, self._written[layer])
        return both

    def array(self, start: int, stop: int | None) -> torch.Tensor:
        """Tokens start .. stop of all layers, in one part from now on."""
        start, stop = self._span(start, stop)
        self._gather(start, stop)
        (tokens,) = self._storage.spans(start, stop)
        return tokens

    def _gather(self, start: int, stop: int) -> None:
        if self._storage.num_parts(start, stop) > 1:
            self.link.guard.run(self._gather_guarded)

    def _gather_guarded(self) -> None:
        self._require_open()
        self._storage.gather()

    def buffer(self, start: int, stop: int | None) -> memoryview:
        """The same, as bytes."""
        start, stop = self._span(start, stop)
        return self._storage.bytes(start, stop)

    def _span(self, start: int, stop: int | None) -> tuple[int, int]:
        self._require_open()
        start = whole_number("start", start)
        stop = self.num_tokens if stop is None else whole_number("stop", stop)
        if not 0 <= start <= stop <= self.capacity_tokens:
            raise InvalidRequest(f"tokens {start} to {stop} are not within the {self.capacity_tokens} reserved")
        return start, stop

    def first_corrupt(self, checksums: bytes) -> int | None:
        """The first cached place whose bytes differ from the checksum given for it."""
        step = self.layout.block_tokens
        starts = range(0, self.num_cached_tokens, step)
        return first_corrupt(checksums, (self._storage.contents(start, start + step) for start in starts))

    def block_at(self, place: int) -> BlockId:
        """The block that stands at a place."""
        return self._blocks[place]

    def check_append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """How many tokens the layer will hold. Raises `InvalidRequest` or `SequenceTooLong`; changes nothing."""
        self._require_open()
        self._require_layer(layer)
        layout = self.layout
        tensor_type = import_torch().Tensor
        if not isinstance(keys, tensor_type) or not isinstance(values, tensor_type):
            raise InvalidRequest(
                f"keys and values must be torch tensors, not {type(keys).__name__} and {type(values).__name__}"
            )
        num_new = keys.shape[1] if keys.dim() == 3 else -1
        wanted_shape = (layout.num_kv_heads, num_new, layout.head_dim)
        if tuple(keys.shape) != wanted_shape or tuple(values.shape) != wanted_shape:
            raise InvalidRequest(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be "
                f"[{layout.num_kv_heads}, n, {layout.head_dim}]"
            )
        for tensor in (keys, values):
            if str(tensor.dtype) != f"torch.{layout.dtype}":
                raise InvalidRequest(f"the cache holds {layout.dtype}, not {tensor.dtype}: convert it knowingly")
        wanted = self._written[layer] + num_new
        self._require_fits(wanted)
        return wanted

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes behind what the layer holds; checked, and room made, before."""
        at = self._written[layer]
        self._storage.write(layer, at, keys.detach(), values.detach())
        self._written[layer] = at + keys.shape[1]

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that were written through `array` or `buffer`."""
        self._require_open()
        num_tokens = whole_number("num_tokens", num_tokens)
        if max(self._written) + num_tokens > self.capacity_tokens:
            raise SequenceTooLong(
                f"{num_tokens} tokens more than {max(self._written)}; {self.capacity_tokens} are reserved"
            )
        self._written = [written + num_tokens for written in self._written]

    def _require_open(self) -> None:
        if self.link.is_forked:
            raise ForkedClient("this process is a fork of the one that opened the sequence; it has no mapping")
        if self.is_closed:
            raise ClientClosed("the sequence was closed")

    def _require_layer(self, layer: int) -> None:
        whole_number("layer", layer, most=self.layout.num_layers - 1)

    def _require_fits(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise SequenceTooLong(f"{num_tokens} tokens do not fit max_tokens={self.max_tokens}")
