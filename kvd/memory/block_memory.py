"""The bytes of one block for a copy, wherever they lie: views of host memory in the end, staged for those of a card.

Whoever copies, on a thread that may wait, takes as many blocks as go together and gets views of them:

    for group in together(blocks):
        with readable([blocks[i] for i in group]) as views: …         what they hold, there already
        with writable([blocks[i] for i in group]) as target:          to be filled
            …; target.keep(indices)                                   those that are whole; the others stay as they were
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from kvd.errors import StateError
from kvd.memory.device_copies import CopyEngine, Lane, Staged
from kvd.memory.device_segment import DeviceSegment


class HostBlock:
    """A block in a host segment. `view` is its bytes, writable."""

    __slots__ = ("nbytes", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = view.nbytes

    def release(self) -> None:
        """The copy is over: the segment may be closed. Idempotent."""
        self.view.release()


class DeviceBlock:
    """A block in a segment of a card, and the engine that copies there."""

    __slots__ = ("engine", "nbytes", "offset", "segment")

    def __init__(self, engine: CopyEngine, segment: DeviceSegment, offset: int, nbytes: int) -> None:
        self.engine = engine
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes

    def release(self) -> None:
        """The copy is over; for whoever does not know what kind of block it is."""


BlockMemory = HostBlock | DeviceBlock


def together(blocks: Sequence[BlockMemory]) -> list[list[int]]:
    """Indices of blocks that can be read or written in one go: all host ones, and what fits a lane of one engine."""
    groups: list[list[int]] = []
    open_groups: dict[CopyEngine | None, tuple[list[int], int]] = {}
    for index, block in enumerate(blocks):
        engine = block.engine if isinstance(block, DeviceBlock) else None
        group, used_nbytes = open_groups.get(engine, ([], 0))
        if not group or (engine is not None and not engine.fits(used_nbytes, block.nbytes)):
            group, used_nbytes = [], 0
            groups.append(group)
        group.append(index)
        open_groups[engine] = group, used_nbytes + CopyEngine.padded_nbytes(block.nbytes)
    return groups


@contextlib.contextmanager
def readable(blocks: Sequence[BlockMemory]) -> Iterator[list[memoryview]]:
    """Views of what a group of `together` holds, good until the end. Raises `CudaError`."""
    engine = _engine(blocks)
    if engine is None:
        yield [cast("HostBlock", block).view for block in blocks]
        return
    with engine.lane(max(block.nbytes for block in blocks)) as lane:
        staged = [lane.download(block.segment, block.offset, block.nbytes) for block in _on_card(blocks)]
        # Before it, the bytes are those of whoever used the staging memory last.
        lane.synchronize()
        yield [one.data for one in staged]


class Target:
    """What `writable` gives: a view for each block, and `keep` for those that were filled."""

    def __init__(self, blocks: Sequence[BlockMemory], lane: Lane | None) -> None:
        self._blocks = blocks
        self._lane = lane
        self._staged: list[Staged] = []
        if lane is None:
            self.views = [cast("HostBlock", block).view for block in blocks]
        else:
            self._staged = [lane.stage(block.nbytes) for block in blocks]
            self.views = [one.data for one in self._staged]

    def keep(self, indices: Iterable[int]) -> None:
        """These views are whole: their bytes are in the blocks at the end of `writable`. Raises `CudaError`."""
        if self._lane is not None:
            blocks = _on_card(self._blocks)
            for index in indices:
                self._lane.upload(blocks[index].segment, blocks[index].offset, self._staged[index])


@contextlib.contextmanager
def writable(blocks: Sequence[BlockMemory]) -> Iterator[Target]:
    """To fill a group of `together`. When it has ended without `CudaError`, what was kept is there for everybody."""
    engine = _engine(blocks)
    if engine is None:
        yield Target(blocks, None)
        return
    with engine.lane(max(block.nbytes for block in blocks)) as lane:
        yield Target(blocks, lane)


def alike(pairs: Sequence[tuple[BlockMemory, BlockMemory]]) -> list[list[int]]:
    """Indices of copies from one block to another that `carrying` can make in one go: same card, same direction."""
    groups: dict[tuple[CopyEngine | None, CopyEngine | None], list[int]] = {}
    for index, (source, target) in enumerate(pairs):
        groups.setdefault((_engine((source,)), _engine((target,))), []).append(index)
    return list(groups.values())


@contextlib.contextmanager
def carrying(pairs: Sequence[tuple[BlockMemory, BlockMemory]]) -> Iterator[list[memoryview]]:
    """Copies between a card and host memory, straight from one block to the other, for a group of `alike`.

    Gives views of the bytes in host memory: they are what the source holds. When it has ended without `CudaError`, the
    target holds them for everybody.
    """
    source, target = pairs[0]
    if isinstance(source, DeviceBlock) and isinstance(target, HostBlock):
        views = [cast("HostBlock", into).view for _, into in pairs]
        with source.engine.lane() as lane:
            for (block, _), view in zip(pairs, views, strict=True):
                one = cast("DeviceBlock", block)
                lane.download_into(one.segment, one.offset, view)
        yield views
    elif isinstance(source, HostBlock) and isinstance(target, DeviceBlock):
        views = [cast("HostBlock", block).view for block, _ in pairs]
        yield views
        with target.engine.lane() as lane:
            for (_, into), view in zip(pairs, views, strict=True):
                one = cast("DeviceBlock", into)
                lane.upload_from(one.segment, one.offset, view)
    else:
        raise StateError("blocks are carried between a card and host memory")


def _engine(blocks: Sequence[BlockMemory]) -> CopyEngine | None:
    first = blocks[0]
    return first.engine if isinstance(first, DeviceBlock) else None


def _on_card(blocks: Sequence[BlockMemory]) -> Sequence[DeviceBlock]:
    return cast("Sequence[DeviceBlock]", blocks)
