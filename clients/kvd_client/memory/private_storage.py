"""Storages that hold copies: for want of mappings (`PrivateStorage`), or to attend faster (`PackedStorage`).

Shared blocks are read with preadv and, before they are sealed, written with pwritev, on the segments' descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.layout import KVLayout
from kvd_client.memory.block_copies import load_blocks, store_blocks, token_bytes, transfer
from kvd_client.memory.mapped_storage import RangeStorage
from kvd_client.memory.segments import PoolMemory, Run
from kvd_client.memory.storage import Storage

if TYPE_CHECKING:
    import torch


class PrivateStorage(RangeStorage):
    """Private memory in the order of the blocks, `[tokens, layers, 2, heads, dim]`: one mapping, however scattered."""

    is_private = True

    def __init__(self, layout: KVLayout, max_blocks: int, memory: PoolMemory, phase: int = 0) -> None:
        super().__init__(layout, max_blocks, memory, phase)
        self._range.map_private(0, self._range.nbytes)

    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        if not sealed:
            return
        block_nbytes = self.layout.block_nbytes
        for run in self.memory.runs(blocks, writable=False):
            self._load(run, first)
            self.num_copied_bytes += run.num_blocks * block_nbytes

    def detach(self, first: int) -> None:
        """Nothing is mapped: what is written goes to the shared blocks with `publish` only."""

    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        for run in self.memory.runs(blocks, writable=True):
            self._store(run, first)

    def unpublish(self, first: int, num_blocks: int) -> None:
        """Nothing to undo: the blocks are still this session's own."""

    def freeze(self) -> None:
        """Nothing to do: nobody else sees this memory."""

    def replace_one(self, place: int, block: BlockId) -> None:
        """Nothing to do: the copy has the same content."""

    def _load(self, run: Run, first: int) -> None:
        transfer(os.preadv, run.fd, run.offset, self._block_bytes(first + run.first, run.num_blocks))

    def _store(self, run: Run, first: int) -> None:
        transfer(os.pwritev, run.fd, run.offset, self._block_bytes(first + run.first, run.num_blocks))

    def _block_bytes(self, first: int, num_blocks: int) -> memoryview:
        block_nbytes = self.layout.block_nbytes
        return self._views.bytes()[first * block_nbytes : (first + num_blocks) * block_nbytes]


class PackedStorage(PrivateStorage):
    """Private memory packed by layer, `[layers, 2, heads, tokens, dim]`: each layer's keys of a head are adjacent."""

    def _arrange(self, flat: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        packed = flat.view(layout.num_layers, 2, layout.num_kv_heads, -1, layout.head_dim)
        return packed.permute(3, 0, 1, 2, 4)

    def copy_tokens(self, source: Storage, start: int, stop: int) -> int:
        # Their order differs, so not byte by byte.
        return Storage.copy_tokens(self, source, start, stop)

    def bytes(self, start: int, stop: int) -> memoryview:
        """A copy, since the tokens are not adjacent."""
        return token_bytes(self.layout, self.token_tensor()[start:stop])

    def _load(self, run: Run, first: int) -> None:
        load_blocks(self.layout, run, self._tokens_of(run, first))

    def _store(self, run: Run, first: int) -> None:
        store_blocks(self.layout, run, self._tokens_of(run, first))

    def _tokens_of(self, run: Run, first: int) -> torch.Tensor:
        start = (first + run.first) * self.layout.block_tokens
        return self.token_tensor()[start : start + run.num_blocks * self.layout.block_tokens]
