"""Copies between a card and host memory, several blocks in flight, for threads that may wait."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass

from kvd.cuda import Context, Stream, address_of
from kvd.cuda.page_lock import StagingMemory
from kvd.errors import CudaError, CudaMisuse
from kvd.memory.device_segment import DeviceSegment

DEFAULT_LANE_NBYTES = 32 << 20
_ALIGNMENT = 4096
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """A part of a lane's staging memory; good until the lane is given back."""

    data: memoryview
    address: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.data.nbytes


class Lane:
    """A stream and staging memory, for one thread at a time.

    Copies run in the order in which they were asked for and beside the caller. What `download` returns means nothing
    before `synchronize`, and what was given to `upload` stays as it is until then.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        """Raises `CudaError`."""
        self.stream: Stream = context.new_stream()
        try:
            self.staging = StagingMemory(context, nbytes)
        except BaseException:
            self.stream.close()
            raise
        self._used_nbytes = 0
        self._unsure = False
        self._held: list[object] = []

    def room_for(self, nbytes: int) -> int:
        """How many more blocks of this size can be staged."""
        return (self.staging.nbytes - self._used_nbytes) // CopyEngine.padded_nbytes(nbytes)

    def stage(self, nbytes: int) -> Staged:
        """Staging memory for one block. Raises `CudaMisuse` when none is left: ask `room_for` first."""
        if not self.room_for(nbytes):
            raise CudaMisuse(f"no room to stage {nbytes} bytes: {self._used_nbytes} of {self.staging.nbytes} are used")
        offset = self._used_nbytes
        self._used_nbytes += CopyEngine.padded_nbytes(nbytes)
        return Staged(self.staging.view(offset, nbytes), self.staging.address + offset)

    def upload(self, segment: DeviceSegment, offset: int, staged: Staged) -> None:
        """Begins to copy a staged block into the segment. Raises `CudaError`."""
        self.stream.upload(segment.place(offset, staged.nbytes), staged.address, staged.nbytes)

    def download(self, segment: DeviceSegment, offset: int, nbytes: int) -> Staged:
        """Begins to copy a block out of the segment. Raises `CudaError`."""
        staged = self.stage(nbytes)
        self.stream.download(staged.address, segment.place(offset, nbytes), nbytes)
        return staged

    def upload_from(self, segment: DeviceSegment, offset: int, source: memoryview) -> None:
        """As `upload`, from memory of the caller's; page-locked, or the call waits for the copy."""
        self._held.append(source)
        self.stream.upload(segment.place(offset, source.nbytes), address_of(source), source.nbytes)

    def download_into(self, segment: DeviceSegment, offset: int, target: memoryview) -> None:
        """As `download`, into memory of the caller's; page-locked, or the call waits for the copy."""
        self._held.append(target)
        self.stream.download(address_of(target), segment.place(offset, target.nbytes), target.nbytes)

    def synchronize(self) -> None:
        """Waits until every copy asked for is done. Raises the `CudaError` of any of them."""
        # Until it succeeds a copy may still run over the memory: see `begin`.
        self._unsure = True
        self.stream.synchronize()
        self._unsure = False
        self._held.clear()

    def settle(self) -> None:
        """For the engine: something failed. Waits once more, since what is copied to is given to others next.

        A card that still does not let itself be waited for counts as lost: nothing may be had there any more. Never
        raises `CudaError`.
        """
        context = self.stream.context
        try:
            self.synchronize()
        except CudaError as error:
            if context.lost is None and not context.closed:
                context.lost = f"copies there cannot be waited for: {error}"

    def begin(self, min_nbytes: int = 0) -> None:
        """For the engine: an empty lane. A lane whose copies could not be waited for is waited for again first.

        Its staging memory is made anew where it holds less than `min_nbytes`. Raises `CudaError`.
        """
        if self._unsure:
            self.synchronize()
        self._used_nbytes = 0
        if self.staging.nbytes < min_nbytes:
            larger = StagingMemory(self.stream.context, CopyEngine.padded_nbytes(min_nbytes))
            self.staging.close()
            self.staging = larger

    def close(self) -> None:
        """For the engine: nobody uses it. Raises `CudaError`."""
        self.staging.close()
        self.stream.close()


class CopyEngine:
    """`num_lanes` lanes; as many threads copy at once, others wait for a lane. Safe to use from any thread."""

    def __init__(self, context: Context, *, num_lanes: int = 2, lane_nbytes: int = DEFAULT_LANE_NBYTES) -> None:
        """A lane holds at least one block, however large. Raises `CudaError`; nothing is left behind then."""
        self.lane_nbytes = lane_nbytes
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        try:
            for _ in range(num_lanes):
                self._lanes.append(Lane(context, lane_nbytes))
        except BaseException:
            self.close()
            raise
        for lane in self._lanes:
            self._free.put(lane)
        if self.unlocked is not None:
            _log.warning("copies go through memory that is not page-locked, at half speed: %s", self.unlocked)

    @property
    def unlocked(self) -> str | None:
        """Why staging memory is not page-locked, None when it is."""
        return next((lane.staging.unlocked for lane in self._lanes if lane.staging.unlocked), None)

    @staticmethod
    def padded_nbytes(nbytes: int) -> int:
        """What a block of that size takes of a lane."""
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def fits(self, used_nbytes: int, nbytes: int) -> bool:
        """Whether a lane of which that much is used has room for one more block."""
        return used_nbytes + self.padded_nbytes(nbytes) <= self.lane_nbytes

    @contextlib.contextmanager
    def lane(self, min_nbytes: int = 0) -> Iterator[Lane]:
        """A lane of one's own for a batch, with room for a block of `min_nbytes`.

        At its end every copy is done, or the `CudaError` of one is raised.
        """
        lane = self._free.get()
        try:
            lane.begin(min_nbytes)
            try:
                yield lane
                lane.synchronize()
            except BaseException:
                # Whatever went wrong: nobody else gets memory over which a copy still runs.
                lane.settle()
                raise
        finally:
            self._free.put(lane)

    def close(self) -> None:
        """For when no thread copies any more. Never raises; idempotent."""
        while self._lanes:
            lane = self._lanes.pop()
            try:
                lane.close()
            except CudaError as error:
                _log.error("a copy lane did not close: %s", error)
