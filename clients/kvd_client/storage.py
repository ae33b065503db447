"""Where a sequence's blocks lie in this process: mapped side by side, nothing copied.

A storage is told by its sequence which block stands at which place and never talks to the daemon. `private_storage` has
the kinds that copy.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.layout import KVLayout
from kvd_client.address_range import AddressRange
from kvd_client.segments import PoolMemory
from kvd_client.tensors import Views

if TYPE_CHECKING:
    import torch


class Storage(ABC):
    """`max_blocks` places for blocks in one address range. Called under the session's guard; excludes nobody itself."""

    def __init__(self, layout: KVLayout, max_blocks: int, memory: PoolMemory, phase: int = 0) -> None:
        """`phase`: see `AddressRange`."""
        self.layout = layout
        self.memory = memory
        self.num_copied_bytes = 0
        self._range = AddressRange(max_blocks * layout.block_nbytes, phase)
        self._views = Views(self._range.address, self._range.nbytes)
        self._tokens: torch.Tensor | None = None
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @abstractmethod
    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        """Puts blocks at places first, first + 1, ...: sealed ones to read, reserved ones to write.

        Raises `OutOfMemory`.
        """

    @abstractmethod
    def detach(self, first: int) -> None:
        """Unmaps whatever blocks an `attach` that failed left at places `first`, first + 1, ...; no view shows them.

        Raises `OutOfMemory`: they may still be mapped then.
        """

    @abstractmethod
    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        """Just before a seal: the bytes are in the shared blocks and no longer writable from here."""

    @abstractmethod
    def unpublish(self, first: int, num_blocks: int) -> None:
        """The seal failed: writable again."""

    @abstractmethod
    def replace(self, place: int, block: BlockId) -> None:
        """Puts another sealed block with the same content in the place of ours. No view lives."""

    def copy_tokens(self, source: Storage, start: int, stop: int) -> int:
        """Copies tokens start .. stop from the same places of another storage; returns the bytes copied."""
        if start >= stop:
            return 0
        nbytes = self.layout.token_nbytes
        ctypes.memmove(self.address + start * nbytes, source.address + start * nbytes, (stop - start) * nbytes)
        return (stop - start) * nbytes

    @property
    def address(self) -> int:
        """Where place 0 begins."""
        return self._range.address

    def token_tensor(self) -> torch.Tensor:
        """All places as [tokens, num_layers, 2, num_kv_heads, head_dim]; parts without a block fault when touched."""
        if self._tokens is None:
            self._tokens = self._arrange(self._views.tensor(self.layout.dtype))
        return self._tokens

    def _arrange(self, flat: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        return flat.view(-1, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)

    def layer_tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer for all places, each [num_kv_heads, tokens, head_dim]."""
        # Kept, so that a decode step costs two narrows a layer.
        found = self._layers.get(layer)
        if found is None:
            both = self.token_tensor().select(1, layer)
            found = (both.select(1, 0).transpose(0, 1), both.select(1, 1).transpose(0, 1))
            self._layers[layer] = found
        return found

    def bytes(self, start: int, stop: int) -> memoryview:
        """The bytes of tokens start .. stop, token-major."""
        nbytes = self.layout.token_nbytes
        return self._views.bytes()[start * nbytes : stop * nbytes]

    def has_live_views(self) -> bool:
        """Whether a caller still holds a tensor or memoryview; our own cached ones are let go first."""
        self._tokens = None
        self._layers = {}
        return self._views.any_alive()

    def when_unused(self, call: Callable[[], None]) -> None:
        """See `Views.when_dead`; no view is made from here on."""
        self._tokens = None
        self._layers = {}
        self._views.when_dead(call)

    def close(self) -> None:
        """Unmaps everything; nobody holds a view. Idempotent."""
        self._range.close()


class MappedStorage(Storage):
    """The blocks themselves, one mapping per run of neighbours."""

    def __init__(self, layout: KVLayout, max_blocks: int, memory: PoolMemory, phase: int = 0) -> None:
        super().__init__(layout, max_blocks, memory, phase)
        self._mapped_nbytes = 0
        """From the start on; blocks are attached place after place."""

    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        block_nbytes = self.layout.block_nbytes
        for run in self.memory.runs(blocks, writable=not sealed):
            offset, nbytes = (first + run.first) * block_nbytes, run.num_blocks * block_nbytes
            self._range.map_file(offset, nbytes, run.fd, run.offset, writable=not sealed)
            self._mapped_nbytes = max(self._mapped_nbytes, offset + nbytes)
            if populate:
                self._range.make_resident(offset, nbytes)

    def detach(self, first: int) -> None:
        # No byte further than what is mapped: a cut at the edges of mappings splits none, so it goes through even at
        # vm.max_map_count.
        offset = first * self.layout.block_nbytes
        if offset < self._mapped_nbytes:
            self._range.forget(offset, self._mapped_nbytes - offset)
            self._mapped_nbytes = offset

    def close(self) -> None:
        super().close()
        self._mapped_nbytes = 0

    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        # Before the seal, not after: from the moment that others can find a block nobody can write it through us.
        self._protect(first, len(blocks), writable=False)

    def unpublish(self, first: int, num_blocks: int) -> None:
        self._protect(first, num_blocks, writable=True)

    def _protect(self, first: int, num_blocks: int, *, writable: bool) -> None:
        block_nbytes = self.layout.block_nbytes
        self._range.protect(first * block_nbytes, num_blocks * block_nbytes, writable=writable)

    def replace(self, place: int, block: BlockId) -> None:
        self.attach(place, [block], sealed=True, populate=False)


_CHECKED_RUNS = 64
_SPARE_MAPPINGS = 2048
"""Left to the rest of the process (allocators, libraries, thread stacks) below vm.max_map_count."""


def has_room_for(num_mappings: int) -> bool:
    """Whether so many more mappings leave the process well below vm.max_map_count.

    Few are granted unseen, since counting costs more than mapping them; the kernel's own refusal is handled too.
    """
    if num_mappings <= _CHECKED_RUNS:
        return True
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as maps:
            held = sum(chunk.count(b"\n") for chunk in iter(lambda: maps.read(1 << 20), b""))
    except OSError:
        return True
    return held + num_mappings + _SPARE_MAPPINGS <= limit
