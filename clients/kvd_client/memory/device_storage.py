"""A sequence on a card: views of the daemon's own memory, at most two of them.

There is no mapping blocks side by side on a card, so what is one tensor on host memory is here one or two parts:

- Blocks that are neighbours in a segment are one part, however many they are.
- Sealed blocks that are scattered are gathered, once, into private memory on the card, and are one part then.
- So are reserved blocks: what is written there goes to the shared blocks just before they are sealed.

A fresh sequence in one run is one part; so is one whose room happens to lie right behind its prefix. Growing takes in
neighbours; other blocks make a second part, and once there are two the last one moves to private memory, which grows by
a half each time. Sealing moves nothing: the border between the parts is where memory ends, not where sealed blocks do.
Copies are queued on torch's current stream, like what the caller computes.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvd.block import BlockId
from kvd.errors import EngineUnsupported, StateError
from kvd.layout import KVLayout
from kvd_client.memory import device_imports
from kvd_client.memory.attendant import attendant
from kvd_client.memory.block_runs import split_runs
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.device_order import Stream, wait_for_device, wait_for_stream
from kvd_client.memory.device_pieces import DirectPiece, Piece, PrivatePiece
from kvd_client.memory.device_segments import DevicePoolMemory, DeviceRun
from kvd_client.memory.device_views import find_torch_device
from kvd_client.memory.storage import Storage
from kvd_client.memory.tensors import CPU, import_torch

if TYPE_CHECKING:
    import torch

_MAX_PARTS = 2


class DeviceStorage(Storage):
    """Invariant: `_pieces` are one or two, without a gap, and cover exactly the places of `_blocks`."""

    def __init__(self, layout: KVLayout, max_blocks: int, memory: DevicePoolMemory, *, packed: bool = False) -> None:
        """`packed` has everything in private memory packed by layer, for who prefers that."""
        super().__init__(layout, max_blocks)
        self._memory = memory
        self._packed = packed
        self._blocks: list[BlockId] = []
        self._pieces: list[Piece] = []
        self._left: list[Piece] = []
        """Pieces that others have taken the place of; views of them may live, and work on them may still run."""
        self._home: ImportedSegment | None = None
        """Used for its card; ours until the end."""
        self._pid = os.getpid()
        self._is_quiet = False

    @property
    def is_private(self) -> bool:
        return self._packed or (bool(self._pieces) and not any(isinstance(each, DirectPiece) for each in self._pieces))

    # What lies where.

    def fill(self, blocks: Sequence[BlockId], num_sealed: int, *, populate: bool) -> None:
        """`populate` means nothing here: there are no page faults on a card."""
        prefix, tail = blocks[:num_sealed], blocks[num_sealed:]
        if not self._packed and self._num_runs(blocks) <= _MAX_PARTS:
            self._add_direct(0, blocks)
            return
        gathers = self._packed or self._num_runs(prefix) > 1
        stays_apart = not self._packed and self._num_runs(tail) == 1
        if gathers and prefix:
            self._add_privately(0, prefix, sealed=True, num_to_come=0 if stays_apart else len(tail))
        else:
            self._add_direct(0, prefix)
        if stays_apart:
            self._add_direct(num_sealed, tail)
        elif tail:
            self._add_privately(num_sealed, tail, sealed=False)

    def attach(self, first: int, blocks: Sequence[BlockId], *, sealed: bool, populate: bool) -> None:
        if not blocks:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, DirectPiece) and self._grow(last, blocks):
            return
        stays_in_place = not self._packed and not isinstance(last, PrivatePiece)
        if stays_in_place and len(self._pieces) < _MAX_PARTS and self._num_runs(blocks) == 1:
            self._add_direct(first, blocks)
        else:
            self._add_privately(first, blocks, sealed=sealed)

    # Each of these three has changed nothing when it raises.

    def _add_direct(self, first: int, blocks: Sequence[BlockId]) -> None:
        """Every run is a piece of its own."""
        self._pieces += self._direct(first, blocks)
        self._blocks += blocks

    def _grow(self, last: DirectPiece, blocks: Sequence[BlockId]) -> bool:
        """Takes the blocks into the last piece if they are its neighbours."""
        if self._num_runs(blocks) > 1:
            return False
        (run,) = self._runs(blocks)
        if not last.is_followed_by(run):
            device_imports.release(run.segment)
            return False
        last.grow(run)
        self._blocks += blocks
        return True

    def _add_privately(
        self, first: int, blocks: Sequence[BlockId], *, sealed: bool, num_to_come: int | None = None
    ) -> None:
        """In private memory, together with the last piece where that is private or would be the second of three.

        Room is made for `num_to_come` blocks more, by default for half as many as there are.
        """
        last = self._pieces[-1] if self._pieces else None
        if last is not None and not isinstance(last, PrivatePiece) and len(self._pieces) < _MAX_PARTS:
            last = None
        start = first if last is None else last.first
        needed = first + len(blocks) - start
        if isinstance(last, PrivatePiece) and needed <= last.capacity:
            piece = last
        else:
            room = needed // 2 if num_to_come is None else num_to_come
            piece = self._new_private(start, needed, room, blocks)
            if last is not None:
                self._copy(last.tokens(last.start_token, last.stop_token), piece, last.start_token)
        if sealed:
            shared = self._direct(first, blocks)
            # Copies from it may run until the end.
            self._left += shared
            for each in shared:
                self._copy(each.tokens(each.start_token, each.stop_token), piece, each.start_token)
        pieces, left = self._pieces, self._left
        if piece is not last:
            pieces = [*pieces, piece]
            if last is not None:
                pieces, left = [*self._pieces[:-1], piece], [*left, last]
        held = [*self._blocks, *blocks]
        # No call between the stores, so that no signal is heeded there.
        piece.num_blocks = needed
        self._pieces, self._left, self._blocks = pieces, left, held

    def _new_private(self, first: int, num_blocks: int, room: int, blocks: Sequence[BlockId]) -> PrivatePiece:
        if self._home is None:
            for run in self._runs(blocks[:1]):
                device_imports.release(run.segment)
        capacity = max(num_blocks, min(num_blocks + room, self.max_blocks - first))
        return PrivatePiece(self.layout, first, num_blocks, capacity, self._torch_device, packed=self._packed)

    def _direct(self, first: int, blocks: Sequence[BlockId]) -> list[Piece]:
        """The blocks themselves, a piece for each run."""
        pieces: list[Piece] = []
        runs = self._runs(blocks)
        try:
            while runs:
                run = runs.pop(0)
                place = first + run.first
                pieces.append(DirectPiece(self.layout, place, run, max(run.num_blocks, self.max_blocks - place)))
        except BaseException:
            for run in runs:
                device_imports.release(run.segment)
            for piece in pieces:
                piece.close()
            raise
        return pieces

    def _copy(self, source: torch.Tensor, piece: Piece, at: int) -> None:
        piece.tokens(at, at + source.shape[0]).copy_(source)
        self.num_copied_bytes += source.shape[0] * self.layout.token_nbytes

    def detach(self, first: int) -> None:
        del self._blocks[first:]
        while self._pieces and self._pieces[-1].first >= first:
            self._left.append(self._pieces.pop())
        if self._pieces and self._pieces[-1].stop > first:
            self._pieces[-1].cut(first)

    def gather(self) -> None:
        if len(self._pieces) < _MAX_PARTS:
            return
        held = len(self._blocks)
        whole = self._new_private(0, held, held // 2, self._blocks)
        for piece in self._pieces:
            self._copy(piece.tokens(piece.start_token, piece.stop_token), whole, piece.start_token)
        self._left += self._pieces
        self._pieces = [whole]

    def replace(self, standing: Mapping[int, BlockId]) -> bool:
        blocks = list(self._blocks)
        for place, block in standing.items():
            blocks[place] = block
        shown = {type(piece) for piece in self._pieces if any(piece.first <= place < piece.stop for place in standing)}
        if DirectPiece in shown:
            # Ours stay where any other arrangement would have to be copied.
            if self.is_any_private or self._num_runs(blocks) > _MAX_PARTS:
                return False
            before, self._pieces = self._pieces, self._direct(0, blocks)
            self._left += before
        # What lies in private memory has the same content. Nothing shows ours; and when nothing works on them either,
        # the daemon may have them, and their segments.
        self.quiesce()
        for piece in self._left:
            piece.close()
        self._left = []
        self._blocks = blocks
        return True

    @property
    def is_any_private(self) -> bool:
        """Whether a part of it lies in memory of this process."""
        return any(isinstance(piece, PrivatePiece) for piece in self._pieces)

    def _num_runs(self, blocks: Sequence[BlockId]) -> int:
        return len(split_runs(blocks, self._memory.blocks_per_segment))

    def _runs(self, blocks: Sequence[BlockId]) -> list[DeviceRun]:
        runs = self._memory.runs(blocks)
        if self._home is None and runs:
            self._home = device_imports.share(runs[0].segment)
        return runs

    def _require_home(self) -> ImportedSegment:
        if self._home is None:
            raise StateError("a storage on a card without a block")
        return self._home

    # What is shown and written.

    def spans(self, start: int, stop: int) -> list[torch.Tensor]:
        if not self._pieces:
            layout = self.layout
            return [self._nothing(0, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)]
        return [piece.tokens(begin, end) for piece, begin, end in self._covering(start, stop)]

    def parts(self, layer: int, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self._pieces:
            nothing = self._nothing(self.layout.num_kv_heads, 0, self.layout.head_dim)
            return [(nothing, nothing)]
        return [piece.layer(layer, begin, end) for piece, begin, end in self._covering(0, num_tokens)]

    def _nothing(self, *shape: int) -> torch.Tensor:
        """What a sequence without a block shows."""
        module = import_torch()
        dtype = getattr(module, self.layout.dtype)
        nothing: torch.Tensor = module.empty(shape, dtype=dtype, device=self._torch_device)
        return nothing

    @property
    def _torch_device(self) -> str:
        return find_torch_device(self._memory.device) or CPU

    def num_parts(self, start: int, stop: int) -> int:
        return max(1, len(self._covering(start, stop)))

    def _covering(self, start: int, stop: int) -> list[tuple[Piece, int, int]]:
        """The pieces in which the tokens lie, each with the tokens in it; one at least, where there is any."""
        found = []
        for piece in self._pieces:
            begin, end = max(start, piece.start_token), min(stop, piece.stop_token)
            if begin < end:
                found.append((piece, begin, end))
        if not found and self._pieces:
            piece = self._pieces[0]
            return [(piece, piece.start_token, piece.start_token)]
        return found

    def write(self, layer: int, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for piece, begin, end in self._covering(at, at + keys.shape[1]):
            own_keys, own_values = piece.layer(layer, begin, end)
            own_keys.copy_(keys[:, begin - at : end - at])
            own_values.copy_(values[:, begin - at : end - at])

    def bytes(self, start: int, stop: int) -> memoryview:
        raise EngineUnsupported("these bytes are on a GPU: use the tensors, or copy them with .cpu()")

    def contents(self, start: int, stop: int) -> memoryview:
        """A copy in host memory."""
        module = import_torch()
        copy = bytearray((stop - start) * self.layout.token_nbytes)
        if start < stop:
            target = module.frombuffer(copy, dtype=getattr(module, self.layout.dtype))
            target = target.view(stop - start, *self._pieces[0].tokens(0, 0).shape[1:])
            for piece, begin, end in self._covering(start, stop):
                target[begin - start : end - start].copy_(piece.tokens(begin, end))
        return memoryview(copy)

    # Order, and the end.

    def synchronize(self, stream: Stream | None) -> None:
        wait_for_stream(self._require_home(), stream)

    def publish(self, first: int, blocks: Sequence[BlockId]) -> None:
        stop, targets = first + len(blocks), 0
        for piece in self._pieces:
            begin, end = max(first, piece.first), min(stop, piece.stop)
            if isinstance(piece, PrivatePiece) and begin < end:
                shared = self._direct(begin, blocks[begin - first : end - first])
                targets += len(shared)
                self._left += shared
                for each in shared:
                    each_tokens = each.tokens(each.start_token, each.stop_token)
                    each_tokens.copy_(piece.tokens(each.start_token, each.stop_token))
        if targets:
            self.synchronize(None)
            # Nothing copies to them any more.
            for each in self._left[-targets:]:
                each.drop_cached()
                each.close()
            del self._left[-targets:]

    def unpublish(self, first: int, num_blocks: int) -> None:
        """Nothing to undo: nothing protects memory on a card."""

    def freeze(self) -> None:
        """A sequence on a card leaves its storage only by becoming another, whose old blocks nobody seals."""

    def _all_pieces(self) -> list[Piece]:
        return [*self._pieces, *self._left]

    def has_live_views(self) -> bool:
        for piece in self._all_pieces():
            piece.drop_cached()
        return any(piece.views.any_alive() for piece in self._all_pieces())

    def when_unused(self, call: Callable[[], None]) -> None:
        pieces = self._all_pieces()
        for piece in pieces:
            piece.drop_cached()
        # Emptied one by one by whoever comes, in any threads; only one of them takes out the last.
        left = deque(range(len(pieces)))

        def died() -> None:
            if not left.pop():
                # Work on the last view may still run, and nobody is to wait for it here.
                attendant().put(functools.partial(self._quiesce_and, call))

        for piece in pieces:
            piece.views.when_dead(died)

    def _quiesce_and(self, call: Callable[[], None]) -> None:
        if os.getpid() == self._pid:
            self.quiesce()
            self._is_quiet = True
            call()

    def quiesce(self) -> None:
        if self._home is not None and not self._is_quiet:
            wait_for_device(self._home)

    def close(self) -> None:
        self.quiesce()
        for piece in self._all_pieces():
            piece.drop_cached()
            piece.close()
        self._pieces, self._left = [], []
        home, self._home = self._home, None
        if home is not None:
            attendant().put(functools.partial(device_imports.release, home))
