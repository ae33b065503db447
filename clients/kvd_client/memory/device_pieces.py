"""The pieces that a sequence lies in where nothing is mapped side by side: runs of blocks, or this process's memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kvd.layout import KVLayout
from kvd_client.memory import device_imports
from kvd_client.memory.attendant import attendant
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.device_segments import DeviceRun
from kvd_client.memory.device_views import DeviceViews, device_views, private_views
from kvd_client.memory.tensors import Views

if TYPE_CHECKING:
    import torch


class Piece:
    """Places first, first + 1, ... in one stretch of memory. One tensor spans all the capacity, so views never move."""

    def __init__(self, layout: KVLayout, first: int, num_blocks: int, capacity: int) -> None:
        """`capacity` blocks are in reach; the first `num_blocks` of them are the sequence's."""
        self.layout = layout
        self.first = first
        self.num_blocks = num_blocks
        self.capacity = capacity
        self.views: Views | DeviceViews
        self._tokens: torch.Tensor | None = None
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def stop(self) -> int:
        """The place behind the last."""
        return self.first + self.num_blocks

    @property
    def start_token(self) -> int:
        """The sequence's token that the piece begins with."""
        return self.first * self.layout.block_tokens

    @property
    def stop_token(self) -> int:
        """The token behind its last."""
        return self.stop * self.layout.block_tokens

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Those of the sequence's tokens, all within this piece, as [tokens, num_layers, 2, num_kv_heads, head_dim]."""
        if self._tokens is None:
            self._tokens = self._arrange(self.views.tensor(self.layout.dtype))
        return self._tokens[start - self.start_token : stop - self.start_token]

    def layer(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer of those tokens, each [num_kv_heads, tokens, head_dim]."""
        found = self._layers.get(layer)
        if found is None:
            both = self.tokens(self.start_token, self.start_token + self.capacity * self.layout.block_tokens)
            both = both.select(1, layer)
            found = (both.select(1, 0).transpose(0, 1), both.select(1, 1).transpose(0, 1))
            self._layers[layer] = found
        at = start - self.start_token
        return found[0].narrow(1, at, stop - start), found[1].narrow(1, at, stop - start)

    def _arrange(self, flat: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        return flat.view(-1, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)

    def drop_cached(self) -> None:
        """Lets go of views of our own."""
        self._tokens = None
        self._layers = {}

    def cut(self, stop: int) -> None:
        """Forgets the places from `stop` on."""
        self.num_blocks = stop - self.first

    def close(self) -> None:
        """Nothing shows it or works on it. Fit for a finalizer. Idempotent."""


class DirectPiece(Piece):
    """A run of the daemon's blocks, as far as its segment reaches behind it: a run that grows stays one piece."""

    def __init__(self, layout: KVLayout, first: int, run: DeviceRun, max_blocks: int) -> None:
        """Takes over the run's use of its segment, also when this fails. Raises `CudaImportRefused`."""
        self._segment: ImportedSegment | None = run.segment
        self._end = run.offset + run.num_blocks * layout.block_nbytes
        in_reach = (run.segment.export.nbytes - run.offset) // layout.block_nbytes
        super().__init__(layout, first, run.num_blocks, min(in_reach, max_blocks))
        try:
            self.views = device_views(run.segment, run.offset, self.capacity * layout.block_nbytes)
        except BaseException:
            self.close()
            raise

    def is_followed_by(self, run: DeviceRun) -> bool:
        """Whether the run begins where this ends, so that both are one."""
        return (
            self._segment is not None
            and run.segment.is_of(self._segment)
            and run.offset == self._end
            and self.num_blocks + run.num_blocks <= self.capacity
        )

    def grow(self, run: DeviceRun) -> None:
        """Takes it in; the run's own use of the segment is given back."""
        self.num_blocks += run.num_blocks
        self._end += run.num_blocks * self.layout.block_nbytes
        device_imports.release(run.segment)

    def cut(self, stop: int) -> None:
        self._end -= (self.stop - stop) * self.layout.block_nbytes
        super().cut(stop)

    def close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            # Not here: it may be the last use, and then the driver is called.
            attendant().put(functools.partial(device_imports.release, segment))


class PrivatePiece(Piece):
    """Memory of this process, in the order of the blocks or `packed` by layer."""

    def __init__(
        self, layout: KVLayout, first: int, num_blocks: int, capacity: int, torch_device: str, *, packed: bool
    ) -> None:
        """On "cpu" or "cuda:N". Raises `OutOfMemory`."""
        super().__init__(layout, first, num_blocks, capacity)
        self.packed = packed
        self.views = private_views(torch_device, capacity * layout.block_nbytes)

    def _arrange(self, flat: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return super()._arrange(flat)
        layout = self.layout
        packed = flat.view(layout.num_layers, 2, layout.num_kv_heads, -1, layout.head_dim)
        return packed.permute(3, 0, 1, 2, 4)
