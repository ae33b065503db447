"""One row of a batch: the sequence that holds its tokens, and how much padding stands before them."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ids

import torch

from kvd.errors import ClientClosed, InvalidRequest, KvdError
from kvd_client.engines.transformers.private_states import PrivateStates
from kvd_client.engines.transformers.split_attention import Part
from kvd_client.sequence import Sequence

_log = logging.getLogger(__name__)


class CachedRow:
    """Token t of the row stands in column `num_padding` + t of the batch; the columns before are padding.

    When the daemon can give no more (a full pool, a restart), what is held is copied to private memory and the
    generation goes on there; from then on nothing is published, and `failure` says why. One thread at a time.
    """

    def __init__(self, sequence: Sequence, num_padding: int = 0) -> None:
        self.sequence = sequence
        self.num_padding = num_padding
        self.failure: KvdError | None = None
        self._private: PrivateStates | None = None
        self._private_ids: list[int] = []
        self._num_copied_bytes = 0

    @property
    def token_ids(self) -> list[int]:
        """The ids known so far, the prompt's not yet computed ones included."""
        return self.sequence.token_ids if self._private is None else self._private_ids

    @property
    def num_copied_bytes(self) -> int:
        """Bytes copied to attach, to fork, or to go on in private memory."""
        return self._num_copied_bytes + (self.sequence.num_copied_bytes if self._private is None else 0)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be read any more."""
        return self._private is None and self.sequence.closed

    @property
    def num_tokens(self) -> int:
        """Tokens in every layer."""
        return self.sequence.num_tokens if self._private is None else self._private.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the keys and values are."""
        return self.parts(0)[0][0].device

    def num_tokens_in(self, layer: int) -> int:
        """Tokens in one layer."""
        held = self.sequence if self._private is None else self._private
        return held.num_tokens_in(layer)

    def parts(self, layer: int) -> list[Part]:
        """Keys and values of one layer in the order of their tokens, in as many tensors as they lie in; views."""
        if self._private is not None:
            return [self._private.layer(layer)]
        return self.sequence.parts(layer)

    def between(self, layer: int, start: int, stop: int) -> list[Part]:
        """`parts` of tokens start .. stop, those that are empty left out."""
        found: list[Part] = []
        for keys, values in self.parts(layer):
            length = keys.shape[1]
            first, last = max(0, start), min(length, stop)
            if first < last:
                found.append((keys.narrow(1, first, last - first), values.narrow(1, first, last - first)))
            start, stop = start - length, stop - length
        return found

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes [num_kv_heads, n, head_dim] behind what one layer holds."""
        if self._private is None:
            try:
                self.sequence.append(layer, keys, values)
            except (InvalidRequest, ClientClosed):
                raise
            except KvdError as error:
                self._go_on_privately(error)
            else:
                return
        self._own().append(layer, keys, values)

    def add_tokens(self, token_ids: Ids[int]) -> None:
        """Names the tokens that follow those known."""
        if self._private is None:
            self.sequence.add_tokens(token_ids)
        else:
            self._private_ids += token_ids

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Says how long computing the row's last tokens took; see `kvd_client.Sequence.computed`."""
        if self._private is None:
            self.sequence.computed(num_tokens, seconds)

    def truncate(self, num_tokens: int) -> None:
        """Forgets the tokens from `num_tokens` on, and their names."""
        if self._private is None:
            try:
                self.sequence.truncate(num_tokens)
            except (InvalidRequest, ClientClosed):
                raise
            except KvdError as error:
                self._go_on_privately(error)
            else:
                return
        self._own().truncate(num_tokens)
        del self._private_ids[num_tokens:]

    def fork(self) -> CachedRow:
        """Another row with the same tokens: sealed blocks are shared, the rest is copied."""
        if self._private is None:
            try:
                twin_sequence = self.sequence.fork()
            except (InvalidRequest, ClientClosed):
                raise
            except KvdError as error:
                self._go_on_privately(error)
            else:
                # The prompt goes on behind what is held: for the twin, too.
                twin_sequence.add_tokens(self.sequence.token_ids[len(twin_sequence.token_ids) :])
                return CachedRow(twin_sequence, self.num_padding)
        twin = CachedRow(self.sequence, self.num_padding)
        twin.failure = self.failure
        twin._private, twin._private_ids = self._own().copy(), list(self._private_ids)
        twin._num_copied_bytes = twin._private.nbytes
        return twin

    def commit(self) -> int:
        """Publishes every full block; returns how many tokens are published. Raises `failure` if there is one."""
        if self.failure is not None:
            raise self.failure
        return self.sequence.commit()

    @property
    def has_full_blocks_to_publish(self) -> bool:
        """Whether `commit` would publish anything."""
        if self._private is not None:
            return False
        block_tokens = self.sequence.layout.block_tokens
        return self.num_tokens // block_tokens > self.sequence.num_sealed_tokens // block_tokens

    def close(self) -> None:
        """Gives everything back; idempotent."""
        self._private = None
        self.sequence.close()

    def _own(self) -> PrivateStates:
        if self._private is None:
            raise ClientClosed("this row was closed")
        return self._private

    def _go_on_privately(self, error: KvdError) -> None:
        """Raises what reading raises: in a forked child, or after the client was closed, nothing is there to copy."""
        layers = range(self.sequence.layout.num_layers)
        private = PrivateStates.copy_of([self.parts(layer) for layer in layers])
        self._private_ids = self.sequence.token_ids
        self._num_copied_bytes = self.sequence.num_copied_bytes + private.nbytes
        self._private, self.failure = private, error
        self.sequence.close()
        _log.warning("kvd: this generation goes on in private memory and is not published: %s", error)
