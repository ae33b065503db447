"""Where a sequence's blocks lie in this process: the contract of every kind.

A storage is told by its sequence which block stands at which place and never talks to the daemon. `mapped_storage` maps
host memory, `private_storage` has the kinds that copy it, `device_storage` is for memory on a card.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.layout import KVLayout
from kvd_client.memory.device_order import Stream

if TYPE_CHECKING:
    import torch


class Storage(ABC):
    """`max_blocks` places for blocks. Called under the session's guard where that changes what lies where; excludes
    nobody itself.
    """

    def __init__(self, layout: KVLayout, max_blocks: int) -> None:
        self.layout = layout
        self.max_blocks = max_blocks
        self.num_copied_bytes = 0

    @property
    @abstractmethod
    def is_private(self) -> bool:
        """Whether everything lies in memory of this process instead of in the shared blocks."""

    @abstractmethod
    def fill(self, blocks: Sequence[BlockId], num_sealed: int, *, populate: bool) -> None:
        """The first blocks of all: sealed ones to read, then reserved ones to write.

        Raises `OutOfMemory`. Whatever it raises, close the storage then.
        """

    @abstractmethod
    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        """Puts more blocks at places first, first + 1, ...: sealed ones to read, reserved ones to write.

        Raises `OutOfMemory`.
        """

    @abstractmethod
    def detach(self, first: int) -> None:
        """Unmaps whatever blocks an `attach` that failed left at places `first`, first + 1, ...; no view shows them.

        Raises `OutOfMemory`: they may still be mapped then.
        """

    @abstractmethod
    def synchronize(self, stream: Stream | None) -> None:
        """Returns when what was written, by `stream` or torch's current one, is in memory. Not under the guard.

        Raises `CudaDeviceLost`.
        """

    @abstractmethod
    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        """Just before a seal, after `synchronize`: the bytes are in the shared blocks, no longer written from here."""

    @abstractmethod
    def unpublish(self, first: int, num_blocks: int) -> None:
        """The seal failed: writable again."""

    @abstractmethod
    def freeze(self) -> None:
        """The sequence has left this storage: what is still written through a view faults, or stays in this process.

        As far as anything protects that kind of memory.
        """

    @abstractmethod
    def replace(self, standing: Mapping[int, BlockId]) -> bool:
        """Puts other sealed blocks with the same content in the places of ours, if that can be. No view lives.

        When true, nothing uses ours any more.
        """

    @abstractmethod
    def spans(self, start: int, stop: int) -> list[torch.Tensor]:
        """Tokens start .. stop as views [tokens, num_layers, 2, num_kv_heads, head_dim], one for each part they lie in.

        At least one, which may be empty.
        """

    @abstractmethod
    def parts(self, layer: int, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the layer's first tokens, each [num_kv_heads, tokens, head_dim]: one pair or two."""

    @abstractmethod
    def num_parts(self, start: int, stop: int) -> int:
        """How many views these tokens need: 1 or 2."""

    @abstractmethod
    def gather(self) -> None:
        """Copies everything into one part, if it is not in one. Raises `OutOfMemory`."""

    @abstractmethod
    def write(self, layer: int, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [num_kv_heads, n, head_dim] of one layer's tokens `at` and on."""

    @abstractmethod
    def bytes(self, start: int, stop: int) -> memoryview:
        """The bytes of tokens start .. stop, token-major. Raises `EngineUnsupported` for those on a card."""

    @abstractmethod
    def contents(self, start: int, stop: int) -> memoryview:
        """What `bytes` would show, to read only, wherever it lies; after `synchronize`."""

    def copy_tokens(self, source: Storage, start: int, stop: int) -> int:
        """Copies tokens start .. stop from the same places of another storage; returns the bytes copied."""
        if start >= stop:
            return 0
        at = start
        for theirs in source.spans(start, stop):
            begin = at
            for ours in self.spans(at, at + theirs.shape[0]):
                ours.copy_(theirs[at - begin : at - begin + ours.shape[0]])
                at += ours.shape[0]
        return (stop - start) * self.layout.token_nbytes

    @abstractmethod
    def has_live_views(self) -> bool:
        """Whether a caller still holds a tensor or memoryview; our own cached ones are let go first."""

    @abstractmethod
    def when_unused(self, call: Callable[[], None]) -> None:
        """Calls once when nothing shows or uses the memory any more, perhaps now, perhaps in any thread.

        No view is made from here on; `call` must be fit for a finalizer.
        """

    @abstractmethod
    def quiesce(self) -> None:
        """Returns when no work of this process uses the memory. Before blocks go back. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Unmaps everything; nobody holds a view. Idempotent."""
