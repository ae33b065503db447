"""What a sequence shows without asking the daemon: counts, token ids, tensors. Shared by both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.layout import KVLayout
from kvd_client.core.sequence_core import SequenceCore
from kvd_client.core.verb import Tokens

if TYPE_CHECKING:
    import torch


class SequenceView:
    """The local half of `Sequence` and `aio.Sequence`. Reading after `close` raises `ClientClosed`."""

    def __init__(self, core: SequenceCore) -> None:
        self._core = core
        core.close_when_collected(self)

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._core.layout

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were found at the start: a multiple of block_tokens, at most the prompt's length - 1."""
        return self._core.num_cached_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens written in all layers, the cached ones included."""
        return self._core.num_tokens

    def num_tokens_in(self, layer: int) -> int:
        """Tokens written in one layer."""
        return self._core.num_tokens_in(layer)

    @property
    def num_missing_tokens(self) -> int:
        """Named tokens that are not written in every layer: what is left to compute."""
        return max(0, self._core.num_named_tokens - self._core.num_tokens)

    @property
    def num_sealed_tokens(self) -> int:
        """Leading tokens whose blocks are sealed: immutable and found by others."""
        return self._core.num_sealed_tokens

    @property
    def max_tokens(self) -> int:
        """What the sequence may ever hold."""
        return self._core.max_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that memory is reserved for now; grows by itself up to `max_tokens`."""
        return self._core.capacity_tokens

    @property
    def num_copied_bytes(self) -> int:
        """Bytes copied to attach, gather or fork this sequence; 0 where everything was mapped."""
        return self._core.num_copied_bytes

    @property
    def is_materialized(self) -> bool:
        """Whether the sequence lies in private memory (asked for, or for lack of mappings) instead of being mapped."""
        return self._core.is_private

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.is_closed

    @property
    def token_ids(self) -> list[int]:
        """The ids known so far: the prompt's, and those named by `add_tokens` or `commit`."""
        return self._core.token_ids

    def add_tokens(self, token_ids: Tokens) -> None:
        """Names the tokens that follow those known, so that their blocks can be sealed. Raises `InvalidTokens`."""
        self._core.add_tokens(token_ids)

    def num_matching_tokens(self, token_ids: Tokens) -> int:
        """How many leading ids this sequence and `token_ids` share."""
        return self._core.num_matching_tokens(token_ids)

    def require_prefix_of(self, token_ids: Tokens) -> None:
        """Raises `InvalidTokens` unless every token held here, and named, stands at its place in `token_ids`.

        An engine calls this before it attends over a sequence that somebody hands it: other tokens' KV is never used.
        """
        self._core.require_prefix_of(token_ids)

    def require_complete(self) -> None:
        """Raises `InvalidRequest` when a named token is not written in every layer."""
        self._core.require_complete()

    def parts(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of one layer as one pair of views, or two in the order of the tokens; no copy.

        Each is [num_kv_heads, tokens, head_dim]; together they show the tokens written in the layer. In host memory
        everything is one part. On a card the blocks lie where they lie, in two parts at most: the prefix, and what is
        written behind it. What moves between them, and when: `kvd_client.memory.device_storage`. Views taken before
        stay right and are as long as they were.
        """
        return self._core.parts(layer)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each a view [num_kv_heads, tokens written in it, head_dim]; no copy.

        On a card a sequence in two parts is gathered into private memory first, and is one part from then on: the copy
        counts in `num_copied_bytes`, and `parts` spares it. Raises `OutOfMemory` where that memory is not to be had.

        In host memory sealed tokens are mapped read-only: writing there ends the process with SIGSEGV, harming nobody
        else. Nothing protects them on a card, so write there through `append` alone.
        """
        return self._core.layer(layer)

    def array(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Tokens start .. stop of all layers, a view [tokens, num_layers, 2, num_kv_heads, head_dim]; no copy.

        `stop` defaults to `num_tokens` and may reach to `capacity_tokens`: write behind `num_tokens`, then `advance`.
        Tokens that lie in two parts on a card are gathered as by `layer`.
        """
        return self._core.array(start, stop)

    def buffer(self, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes of `array(start, stop)`, in that order, without torch. Of a materialized sequence it is a copy.

        Raises `EngineUnsupported` on a card, whose memory the CPU cannot touch.
        """
        return self._core.buffer(start, stop)

    def advance(self, num_tokens: int) -> None:
        """Says that the next `num_tokens` tokens were written in every layer, through `array` or `buffer`.

        Raises `SequenceTooLong` beyond `capacity_tokens`.
        """
        self._core.advance(num_tokens)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Says how long computing `num_tokens` tokens of this sequence took; the daemon hears it with the next commit.

        It is what `kvd status` estimates the prefill seconds that sharing saves by. Fewer than 64 tokens at a time are
        passed over. `get_or_compute` and the engines call it by themselves.
        """
        self._core.computed(num_tokens, seconds)
