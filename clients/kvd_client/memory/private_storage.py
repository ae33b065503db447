"""Storages that hold copies: for want of mappings (`PrivateStorage`), or to attend faster (`PackedStorage`).

Shared blocks are read with preadv and, before they are sealed, written with pwritev, on the segments' descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.errors import StateError
from kvd.layout import KVLayout
from kvd_client.memory.mapped_storage import RangeStorage
from kvd_client.memory.segments import PoolMemory
from kvd_client.memory.storage import Storage
from kvd_client.memory.tensors import import_torch

if TYPE_CHECKING:
    import torch

_SCRATCH_NBYTES = 8 << 20


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
            self._load(run.fd, run.offset, first + run.first, run.num_blocks)
            self.num_copied_bytes += run.num_blocks * block_nbytes

    def detach(self, first: int) -> None:
        """Nothing is mapped: what is written goes to the shared blocks with `publish` only."""

    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        for run in self.memory.runs(blocks, writable=True):
            self._store(run.fd, run.offset, first + run.first, run.num_blocks)

    def unpublish(self, first: int, num_blocks: int) -> None:
        """Nothing to undo: the blocks are still this session's own."""

    def freeze(self) -> None:
        """Nothing to do: nobody else sees this memory."""

    def replace_one(self, place: int, block: BlockId) -> None:
        """Nothing to do: the copy has the same content."""

    def _load(self, fd: int, offset: int, first: int, num_blocks: int) -> None:
        _transfer(os.preadv, fd, offset, self._block_bytes(first, num_blocks))

    def _store(self, fd: int, offset: int, first: int, num_blocks: int) -> None:
        _transfer(os.pwritev, fd, offset, self._block_bytes(first, num_blocks))

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
        torch = import_torch()
        gathered = torch.empty((stop - start) * self.layout.token_nbytes, dtype=torch.uint8)
        self._token_major(gathered).copy_(self.token_tensor()[start:stop])
        copy = bytearray(len(gathered))
        torch.frombuffer(copy, dtype=torch.uint8).copy_(gathered)
        return memoryview(copy)

    def _load(self, fd: int, offset: int, first: int, num_blocks: int) -> None:
        def move(scratch: torch.Tensor, tokens: torch.Tensor, buffer: memoryview, at: int) -> None:
            _transfer(os.preadv, fd, at, buffer)
            tokens.copy_(scratch)

        self._by_scratch(move, offset, first, num_blocks)

    def _store(self, fd: int, offset: int, first: int, num_blocks: int) -> None:
        def move(scratch: torch.Tensor, tokens: torch.Tensor, buffer: memoryview, at: int) -> None:
            scratch.copy_(tokens)
            _transfer(os.pwritev, fd, at, buffer)

        self._by_scratch(move, offset, first, num_blocks)

    def _by_scratch(
        self,
        move: Callable[[torch.Tensor, torch.Tensor, memoryview, int], None],
        offset: int,
        first: int,
        num_blocks: int,
    ) -> None:
        torch = import_torch()
        block_nbytes, block_tokens = self.layout.block_nbytes, self.layout.block_tokens
        step = max(1, min(num_blocks, _SCRATCH_NBYTES // block_nbytes))
        scratch = bytearray(step * block_nbytes)
        for done in range(0, num_blocks, step):
            count = min(step, num_blocks - done)
            buffer = memoryview(scratch)[: count * block_nbytes]
            start = (first + done) * block_tokens
            move(
                self._token_major(torch.frombuffer(buffer, dtype=torch.uint8)),
                self.token_tensor()[start : start + count * block_tokens],
                buffer,
                offset + done * block_nbytes,
            )

    def _token_major(self, raw: torch.Tensor) -> torch.Tensor:
        torch = import_torch()
        layout = self.layout
        typed = raw.view(getattr(torch, layout.dtype))
        return typed.view(-1, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, offset: int, buffer: memoryview) -> None:
    """Preadv or pwritev until all is done; the kernel moves at most 2 GiB a call."""
    done = 0
    while done < len(buffer):
        moved = call(fd, [buffer[done:]], offset + done)
        if not moved:
            raise StateError("a segment ended before its last block")
        done += moved
