"""A sequence that is attended over elsewhere than its blocks are: a copy, packed by layer, on the device that computes.

Sealed blocks are read from host memory when they are attached, once; what is written goes to the reserved blocks just
before they are sealed. Between the two nothing crosses the bus, and everything is one part. The copy grows by a half
each time. Copies between the devices are complete when their call returns, so no block is given back under one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.errors import CudaDeviceLost, EngineUnsupported, OutOfMemory
from kvd.layout import KVLayout
from kvd_client.memory.block_copies import load_blocks, store_blocks, token_bytes
from kvd_client.memory.device_order import Stream
from kvd_client.memory.device_pieces import PrivatePiece
from kvd_client.memory.segments import PoolMemory
from kvd_client.memory.storage import Storage
from kvd_client.memory.tensors import CPU, import_torch

if TYPE_CHECKING:
    import torch


class CopiedStorage(Storage):
    """`memory` is the host pool; `torch_device`, "cpu" or "cuda:N", is where the copy is."""

    is_private = True

    def __init__(self, layout: KVLayout, max_blocks: int, memory: PoolMemory, torch_device: str) -> None:
        """Raises `EngineUnsupported` where this torch has no card, `OutOfMemory`."""
        super().__init__(layout, max_blocks)
        if torch_device != CPU and not import_torch().cuda.is_available():
            raise EngineUnsupported(f"this torch sees no card, and the sequence is to be on {torch_device}")
        self._memory = memory
        self._torch_device = torch_device
        self._piece = PrivatePiece(layout, 0, 0, 1, torch_device, packed=True)

    def fill(self, blocks: Sequence[BlockId], num_sealed: int, *, populate: bool) -> None:
        """`populate` means nothing here: the copy is touched as it is made."""
        self._make_room(len(blocks))
        self.attach(0, blocks[:num_sealed], sealed=True, populate=populate)
        self.attach(num_sealed, blocks[num_sealed:], sealed=False, populate=populate)

    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        self._make_room(first + len(blocks))
        if not sealed:
            return
        with self._torch_errors():
            for run in self._memory.runs(blocks, writable=False):
                load_blocks(self.layout, run, self._tokens_of(first + run.first, run.num_blocks))
                self.num_copied_bytes += run.num_blocks * self.layout.block_nbytes

    def _make_room(self, num_blocks: int) -> None:
        before = self._piece
        if num_blocks <= before.capacity:
            before.num_blocks = max(before.num_blocks, num_blocks)
            return
        capacity = max(num_blocks, min(num_blocks + num_blocks // 2, self.max_blocks))
        piece = PrivatePiece(self.layout, 0, num_blocks, capacity, self._torch_device, packed=True)
        if before.num_blocks:
            with self._torch_errors():
                piece.tokens(0, before.stop_token).copy_(before.tokens(0, before.stop_token))
            self.num_copied_bytes += before.num_blocks * self.layout.block_nbytes
        # Views of it keep its memory, and what they show.
        before.drop_cached()
        self._piece = piece

    def _tokens_of(self, place: int, num_blocks: int) -> torch.Tensor:
        block_tokens = self.layout.block_tokens
        return self._piece.tokens(place * block_tokens, (place + num_blocks) * block_tokens)

    @contextlib.contextmanager
    def _torch_errors(self) -> Iterator[None]:
        """Torch's errors of a card, as ours."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, import_torch().OutOfMemoryError):
                raise OutOfMemory(f"no memory on {self._torch_device} for a copy: {error}") from error
            raise CudaDeviceLost(f"work on {self._torch_device} failed: {error}") from error

    def detach(self, first: int) -> None:
        """Nothing is mapped: what is written goes to the shared blocks with `publish` only."""

    def synchronize(self, stream: Stream | None) -> None:
        with self._torch_errors():
            if stream is not None:
                stream.synchronize()
            elif self._torch_device != CPU:
                import_torch().cuda.current_stream(self._torch_device).synchronize()

    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        with self._torch_errors():
            for run in self._memory.runs(blocks, writable=True):
                store_blocks(self.layout, run, self._tokens_of(first + run.first, run.num_blocks))

    def unpublish(self, first: int, num_blocks: int) -> None:
        """Nothing to undo: the blocks are still this session's own."""

    def freeze(self) -> None:
        """Nothing to do: nobody else sees this memory."""

    def replace(self, standing: Mapping[int, BlockId]) -> bool:
        """Nothing to do: the copy has the same content."""
        return True

    def spans(self, start: int, stop: int) -> list[torch.Tensor]:
        return [self._piece.tokens(start, stop)]

    def parts(self, layer: int, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self._piece.layer(layer, 0, num_tokens)]

    def num_parts(self, start: int, stop: int) -> int:
        return 1

    def gather(self) -> None:
        """It is in one part."""

    def write(self, layer: int, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        own_keys, own_values = self._piece.layer(layer, at, at + keys.shape[1])
        own_keys.copy_(keys)
        own_values.copy_(values)

    def bytes(self, start: int, stop: int) -> memoryview:
        """A copy in host memory, since the tokens are not adjacent."""
        with self._torch_errors():
            return token_bytes(self.layout, self._piece.tokens(start, stop))

    def contents(self, start: int, stop: int) -> memoryview:
        return self.bytes(start, stop)

    def has_live_views(self) -> bool:
        self._piece.drop_cached()
        return self._piece.views.any_alive()

    def when_unused(self, call: Callable[[], None]) -> None:
        self._piece.drop_cached()
        self._piece.views.when_dead(call)

    def quiesce(self) -> None:
        """Nothing works on the shared blocks but copies, and those are complete."""

    def close(self) -> None:
        # The memory goes with the last tensor over it.
        self._piece.drop_cached()
