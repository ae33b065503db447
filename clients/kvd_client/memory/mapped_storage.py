"""Host memory: the blocks themselves, mapped side by side in one address range, nothing copied."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.errors import KvdError
from kvd.layout import KVLayout
from kvd_client.memory.address_range import AddressRange
from kvd_client.memory.device_order import Stream
from kvd_client.memory.segments import PoolMemory
from kvd_client.memory.storage import Storage
from kvd_client.memory.tensors import Views

if TYPE_CHECKING:
    import torch


class RangeStorage(Storage):
    """Places in one range of host addresses, so everything is always one part."""

    is_private = False

    def __init__(self, layout: KVLayout, max_blocks: int, memory: PoolMemory, phase: int = 0) -> None:
        """`phase`: see `AddressRange`."""
        super().__init__(layout, max_blocks)
        self.memory = memory
        self._range = AddressRange(max_blocks * layout.block_nbytes, phase)
        self._views = Views(self._range.address, self._range.nbytes)
        self._tokens: torch.Tensor | None = None
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, blocks: Sequence[BlockId], num_sealed: int, *, populate: bool) -> None:
        self.attach(0, blocks[:num_sealed], sealed=True, populate=populate)
        self.attach(num_sealed, blocks[num_sealed:], sealed=False, populate=populate)

    def synchronize(self, stream: Stream | None) -> None:
        """Nothing to wait for: the CPU wrote. A stream that is named is waited for, as it may copy to here."""
        if stream is not None:
            stream.synchronize()

    @abstractmethod
    def replace_one(self, place: int, block: BlockId) -> None:
        """Puts another sealed block with the same content in the place of ours."""

    def replace(self, standing: Mapping[int, BlockId]) -> bool:
        for place, block in standing.items():
            self.replace_one(place, block)
        return True

    def copy_tokens(self, source: Storage, start: int, stop: int) -> int:
        if start >= stop or not isinstance(source, RangeStorage):
            return super().copy_tokens(source, start, stop)
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
            self._range.is_viewed = True
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

    def spans(self, start: int, stop: int) -> list[torch.Tensor]:
        return [self.token_tensor()[start:stop]]

    def parts(self, layer: int, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = self.layer_tensors(layer)
        return [(keys.narrow(1, 0, num_tokens), values.narrow(1, 0, num_tokens))]

    def num_parts(self, start: int, stop: int) -> int:
        return 1

    def gather(self) -> None:
        """It is in one part."""

    def write(self, layer: int, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        own_keys, own_values = self.layer_tensors(layer)
        own_keys.narrow(1, at, keys.shape[1]).copy_(keys)
        own_values.narrow(1, at, values.shape[1]).copy_(values)

    def bytes(self, start: int, stop: int) -> memoryview:
        nbytes = self.layout.token_nbytes
        self._range.is_viewed = True
        return self._views.bytes()[start * nbytes : stop * nbytes]

    def contents(self, start: int, stop: int) -> memoryview:
        return self.bytes(start, stop)

    def has_live_views(self) -> bool:
        self._tokens = None
        self._layers = {}
        return self._views.any_alive()

    def when_unused(self, call: Callable[[], None]) -> None:
        self._tokens = None
        self._layers = {}
        self._views.when_dead(call)

    def quiesce(self) -> None:
        """What uses it is the CPU, in the caller's own thread."""

    def close(self) -> None:
        self._range.close()


class MappedStorage(RangeStorage):
    """The blocks themselves, one mapping per run of neighbours."""

    def __init__(self, layout: KVLayout, max_blocks: int, memory: PoolMemory, phase: int = 0) -> None:
        super().__init__(layout, max_blocks, memory, phase)
        self._mapped_nbytes = 0
        """No block is mapped from there on. Blocks are attached place after place."""

    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        block_nbytes = self.layout.block_nbytes
        for run in self.memory.runs(blocks, writable=not sealed):
            offset, nbytes = (first + run.first) * block_nbytes, run.num_blocks * block_nbytes
            mapped_nbytes = self._mapped_nbytes
            # Beforehand: a signal that raises as soon as the mapping stands must not hide it from `detach`.
            self._mapped_nbytes = max(mapped_nbytes, offset + nbytes)
            try:
                self._range.map_file(offset, nbytes, run.fd, run.offset, writable=not sealed)
            except KvdError:
                # Refused: nothing new is mapped there, and `detach` must not cut where no mapping ends.
                self._mapped_nbytes = mapped_nbytes
                raise
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

    def freeze(self) -> None:
        # At the edges of mappings, so that it splits none. Blocks that are sealed later lie in here too.
        if self._mapped_nbytes:
            self._range.protect(0, self._mapped_nbytes, writable=False)

    def replace_one(self, place: int, block: BlockId) -> None:
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
