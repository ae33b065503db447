"""The host tier (L2): blocks in memory files under a byte budget, least recently used out first.

Copies go through pread and pwrite on the memory files: the kernel copies as fast as memcpy, without the interpreter
lock, and nothing need be mapped. Every copy runs outside the lock; the slot it runs over has a user meanwhile, so it is
neither given away nor overwritten.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvd.block import NamespaceDigest
from kvd.errors import (
    BlockCorrupt,
    BlockMissing,
    ConfigError,
    OutOfMemory,
    StaleGeneration,
    StateError,
    TierError,
    TierFull,
    TierUnavailable,
)
from kvd.status import TierStatus, TierUsage
from kvd.tiers.base import Generation, Outcome, Read, Tier, TierKey, Write
from kvd.tiers.counters import TierCounters
from kvd.tiers.host_slots import SegmentMemory, Slot, SlotTable
from kvd.tiers.names import NamespaceName

_Item = TypeVar("_Item", Read, Write)

MAX_IDLE_NAMES = 1 << 14
"""Names of namespaces without a block that are kept."""


class HostTier(Tier):
    """Blocks in host memory.

    `make_segment(nbytes)` gives memory, or raises `OutOfMemory`: then blocks are evicted instead.
    """

    def __init__(
        self,
        *,
        make_segment: Callable[[int], SegmentMemory],
        budget_nbytes: int,
        segment_nbytes: int = 64 << 20,
        name: str = "host",
    ) -> None:
        if segment_nbytes <= 0 or budget_nbytes < segment_nbytes:
            raise ConfigError(
                f"the {name} tier's budget of {budget_nbytes} bytes is below one segment of {segment_nbytes}"
            )
        self.name = name
        self._make_segment = make_segment
        self._budget_nbytes = budget_nbytes
        self._segment_nbytes = segment_nbytes
        self._lock = threading.Lock()
        self._copy_ended = threading.Condition(self._lock)
        self._num_copies = 0
        self._table = SlotTable()
        self._growing_nbytes = 0  # of segments being made outside the lock: the budget counts them
        self._generations: Counter[NamespaceDigest] = Counter()
        self._names: dict[NamespaceDigest, NamespaceName] = {}
        """Those said last come last."""
        self._counters = TierCounters()
        self._closed = False

    def generation(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        """Counts this process's flushes of the namespace: nothing in memory outlives the process."""
        with self._lock:
            self._check_open()
            self._keep_name(namespace, name)
            return Generation(self._generations[namespace])

    def names(self) -> list[NamespaceName]:
        """Of the blocks that are here."""
        with self._lock:
            self._check_open()
            spaces = {key.namespace for key in self._table.keys}
            return [name for namespace, name in self._names.items() if namespace in spaces]

    def contains(self, keys: Sequence[TierKey]) -> list[bool]:
        """A dictionary look-up each."""
        with self._lock:
            self._check_open()
            return [self._table.find(key) is not None for key in keys]

    def get_many(self, reads: Sequence[Read]) -> list[Outcome]:
        """One copy each."""
        started_s = time.monotonic()
        outcomes = [_outcome_of(self._get, read) for read in reads]
        nbytes = sum(len(read.into) for read, one in zip(reads, outcomes, strict=True) if one is None)
        self._counters.reads(outcomes, nbytes=nbytes, seconds=time.monotonic() - started_s)
        return outcomes

    def put_many(self, writes: Sequence[Write]) -> list[Outcome]:
        """One copy each; a slot is found by nobody until its bytes are whole."""
        started_s = time.monotonic()
        outcomes = [_outcome_of(self._put, write) for write in writes]
        nbytes = sum(len(write.data) for write, one in zip(writes, outcomes, strict=True) if one is None)
        self._counters.writes(outcomes, nbytes=nbytes, seconds=time.monotonic() - started_s)
        return outcomes

    def delete(self, keys: Sequence[TierKey]) -> int:
        """The slot is free again at once, or when the last copy over it ends."""
        with self._lock:
            self._check_open()
            num_deleted = sum(self._table.forget(key) for key in keys)
        self._counters.deletes(num_deleted)
        return num_deleted

    def flush(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        """Puts that are under way notice it when they want to publish."""
        with self._lock:
            self._check_open()
            self._keep_name(namespace, name)
            self._generations[namespace] += 1
            for key in self._table.keys:
                if key.namespace == namespace:
                    self._table.forget(key)
            return Generation(self._generations[namespace])

    def usage(self) -> TierUsage:
        """Bytes of whole segments: that is what the machine misses."""
        self._check_open()
        return self._measure()

    def is_answering(self) -> bool:
        """Until it is closed."""
        return not self._closed

    def status(self) -> TierStatus:
        """Waits for nobody."""
        if self._closed:
            return self._counters.status(name=self.name, kind="host", state="down", reason="closed")
        self._measure()
        return self._counters.status(name=self.name, kind="host")

    def close(self) -> None:
        """Waits for the copies that run: a descriptor must not be closed, and its number used anew, under one."""
        with self._lock:
            self._closed = True
            self._copy_ended.wait_for(lambda: self._num_copies == 0)
            memories = self._table.take_all()
        for memory in memories:
            memory.close()

    def check_integrity(self) -> None:
        """Raises `StateError` naming the fault; call it while no copy is running."""
        with self._lock:
            self._table.check_integrity()
            if self._table.segments_nbytes + self._growing_nbytes > self._budget_nbytes:
                raise StateError(f"the {self.name} tier holds more than its budget")

    def _get(self, read: Read) -> None:
        with self._lock:
            self._check_open()
            slot = self._table.find(read.key)
            if slot is None:
                raise BlockMissing("not in the host tier")
            if slot.segment.slot_nbytes != len(read.into):
                self._table.forget(read.key)
                raise BlockCorrupt("the host tier's block has another length", cause="bad-length")
            self._table.touch(read.key, slot)
            slot.num_users += 1
            self._num_copies += 1
        try:
            _pread(slot, read.into)
        finally:
            self._end_copy(slot)

    def _put(self, write: Write) -> None:
        with self._lock:
            self._check_fresh(write)
            if (present := self._table.find(write.key)) is not None:
                self._table.touch(write.key, present)
                return
        slot = self._reserve_slot(len(write.data))
        published = False
        try:
            _pwrite(slot, write.data)
            with self._lock:
                # A flush or another writer of the same block may have come between; then this copy is nobody's.
                self._check_fresh(write)
                if self._table.find(write.key) is None:
                    self._table.publish(write.key, slot)
                    published = True
        finally:
            self._end_copy(slot, discard=not published)

    def _end_copy(self, slot: Slot, *, discard: bool = False) -> None:
        with self._lock:
            self._table.release(slot, discard=discard)
            self._num_copies -= 1
            self._copy_ended.notify_all()

    def _reserve_slot(self, nbytes: int) -> Slot:
        """A slot with one user: a free one, else of a new segment, else of a colder one, else of the coldest block."""
        if not 0 < nbytes <= self._segment_nbytes:
            raise TierFull(f"a block of {nbytes} bytes does not fit a segment of {self._segment_nbytes}")
        may_grow = True
        while True:
            given_up: SegmentMemory | None = None
            with self._lock:
                self._check_open()
                if (slot := self._table.take_free(nbytes)) is not None:
                    self._num_copies += 1
                    return slot
                held = self._table.segments_nbytes + self._growing_nbytes
                grow = may_grow and held + self._segment_nbytes <= self._budget_nbytes
                if grow:
                    self._growing_nbytes += self._segment_nbytes
                else:
                    given_up = self._table.take_colder_segment(nbytes)
                    if given_up is None and not self._table.evict(nbytes):
                        raise TierFull(f"every block of the {self.name} tier is being copied")
            if given_up is not None:
                given_up.close()
                may_grow = True
            elif grow:
                may_grow = self._grow(nbytes)

    def _grow(self, slot_nbytes: int) -> bool:
        """Make a segment, outside the lock, for it takes milliseconds. False when the machine has no memory."""
        memory: SegmentMemory | None = None
        try:
            memory = self._make_segment(self._segment_nbytes)
        except OutOfMemory as error:
            self._counters.error(TierFull(str(error), cause="out-of-memory"))
        with self._lock:
            self._growing_nbytes -= self._segment_nbytes
            usable = memory is not None and not self._closed
            if memory is not None and usable:
                self._table.add_segment(memory, slot_nbytes)
        if memory is not None and not usable:
            memory.close()
        return usable

    def _measure(self) -> TierUsage:
        # Two numbers, each read whole: without the lock, which a flush holds for as long as it looks at every key.
        usage = TierUsage(
            num_blocks=len(self._table),
            used_nbytes=self._table.segments_nbytes,
            budget_nbytes=self._budget_nbytes,
        )
        return self._counters.measured(usage)

    def _keep_name(self, namespace: NamespaceDigest, name: NamespaceName | None) -> None:
        """Called with the lock held. Who uses a namespace says its name again and again, so old ones may go."""
        if name is None:
            return
        self._names.pop(namespace, None)
        self._names[namespace] = name
        if len(self._names) > 2 * MAX_IDLE_NAMES:
            spaces = {key.namespace for key in self._table.keys}
            idle = [one for one in self._names if one not in spaces]
            for one in idle[: -MAX_IDLE_NAMES or None]:
                del self._names[one]

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"the {self.name} tier is closed", cause="closed")

    def _check_fresh(self, write: Write) -> None:
        self._check_open()
        if self._generations[write.key.namespace] != write.generation:
            raise StaleGeneration("the namespace was flushed", cause="flushed")


def _outcome_of(action: Callable[[_Item], None], item: _Item) -> Outcome:
    try:
        action(item)
    except TierError as error:
        return error
    return None


def _pread(slot: Slot, into: memoryview) -> None:
    done = 0
    try:
        while done < len(into):
            count = os.preadv(slot.segment.memory.writable_fd, [into[done:]], slot.offset + done)
            if count == 0:
                raise BlockCorrupt("the host tier's segment ends within the block", cause="bad-length")
            done += count
    except OSError as error:
        raise TierUnavailable(f"the host tier's memory cannot be read: {error}", cause="os-error") from error


def _pwrite(slot: Slot, data: memoryview) -> None:
    done = 0
    try:
        while done < len(data):
            done += os.pwrite(slot.segment.memory.writable_fd, data[done:], slot.offset + done)
    except OSError as error:
        raise TierUnavailable(f"the host tier's memory cannot be written: {error}", cause="os-error") from error
