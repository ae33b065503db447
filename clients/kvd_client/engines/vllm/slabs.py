"""Copies between vLLM's cache, layer outermost, and kvd's blocks, where a block has all layers. CPU memory only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvd.errors import EngineUnsupported
from kvd.layout import KVLayout

Bytes = npt.NDArray[np.uint8]


class Slabs:
    """vLLM's cache as slabs: one block of one layer, `[heads, block_size, keys and values]`, contiguous.

    In kvd a block of vLLM's size is its layers' slabs one after the other. Copies hold the GIL for moments only.
    Nothing is locked: whoever calls knows that nobody writes what is read here.
    """

    def __init__(
        self, layout: KVLayout, block_size: int, layers: Sequence[str], caches: Mapping[str, torch.Tensor]
    ) -> None:
        """`caches`: per layer [blocks, heads, block_size, 2 * head_dim]. Raises `EngineUnsupported` for others."""
        self.block_size = block_size
        shape = (layout.num_kv_heads, block_size, 2 * layout.head_dim)
        self._slab_nbytes = layout.num_kv_heads * block_size * 2 * layout.head_dim * layout.itemsize
        self._layers = [_as_slabs(name, caches.get(name), shape, layout.dtype) for name in layers]
        self._num_blocks = min(len(layer) for layer in self._layers)

    @property
    def block_nbytes(self) -> int:
        """Of one of vLLM's blocks with all layers."""
        return len(self._layers) * self._slab_nbytes

    def copy_out(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copies vLLM's blocks, in this order, into consecutive memory."""
        target = self._arranged(len(blocks), into)
        for place, run in self._runs(blocks):
            for number, layer in enumerate(self._layers):
                np.copyto(target[place : place + len(run), number], layer[run.start : run.stop])

    def copy_in(self, blocks: Sequence[int], source: memoryview) -> None:
        """The other way."""
        arranged = self._arranged(len(blocks), source)
        for place, run in self._runs(blocks):
            for number, layer in enumerate(self._layers):
                np.copyto(layer[run.start : run.stop], arranged[place : place + len(run), number])

    def _arranged(self, num_blocks: int, memory: memoryview) -> Bytes:
        return np.frombuffer(memory, np.uint8).reshape(num_blocks, len(self._layers), self._slab_nbytes)

    def _runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, range]]:
        """(place, neighbours): blocks that lie side by side in vLLM's cache take one copy a layer."""
        place = 0
        while place < len(blocks):
            stop = place + 1
            while stop < len(blocks) and blocks[stop] == blocks[stop - 1] + 1:
                stop += 1
            run = range(blocks[place], blocks[place] + stop - place)
            if not 0 <= run.start < run.stop <= self._num_blocks:
                raise EngineUnsupported(f"blocks {run.start} to {run.stop} of a cache of {self._num_blocks}")
            yield place, run
            place = stop


def _as_slabs(name: str, cache: torch.Tensor | None, shape: tuple[int, ...], dtype: str) -> Bytes:
    """[blocks, bytes] over one layer's memory."""
    if cache is None or tuple(cache.shape[1:]) != shape or str(cache.dtype) != f"torch.{dtype}":
        found = "nothing" if cache is None else f"{list(cache.shape)} of {cache.dtype}"
        raise EngineUnsupported(f"the cache of {name} is {found}, expected [blocks, {str(list(shape))[1:]} of {dtype}")
    if cache.device.type != "cpu" or not cache[0].is_contiguous():
        raise EngineUnsupported(f"the cache of {name} is scattered, or not in host memory")
    slabs: Bytes = cache.detach().flatten(1).view(torch.uint8).numpy()
    if slabs.ctypes.data != cache.data_ptr():
        raise EngineUnsupported(f"the cache of {name} cannot be looked at without a copy")
    return slabs
