"""Where the host tier's bytes lie: segments cut into slots of one block size. Pure bookkeeping, no I/O, no locks.

A segment serves one block size at a time. Memory moves between sizes by segments: when a size is short and another
size's segment has not been used for longer than our own oldest block, that whole segment is given up.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from kvd.errors import StateError
from kvd.tiers.base import TierKey


class SegmentMemory(Protocol):
    """What the host tier needs of a segment; `kvd.memory.HostSegment` is one."""

    @property
    def writable_fd(self) -> int:
        """A memory file of `nbytes` bytes, all of them really there."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(slots=True, eq=False)
class Segment:
    """One memory file cut into equal slots."""

    memory: SegmentMemory
    slot_nbytes: int
    free: list[int] = field(default_factory=list)
    num_slots: int = 0
    last_used: int = 0

    def __post_init__(self) -> None:
        self.num_slots = self.memory.nbytes // self.slot_nbytes
        self.free = list(range(self.num_slots - 1, -1, -1))


@dataclass(slots=True, eq=False)
class Slot:
    """One place for one block. While `num_users` > 0 a copy runs over it, so it is neither moved nor given away."""

    segment: Segment
    index: int
    num_users: int = 0
    forgotten: bool = False

    @property
    def offset(self) -> int:
        """Where it begins in the segment's memory file."""
        return self.index * self.segment.slot_nbytes


class SlotTable:
    """Blocks found by key, least recently used first, per block size. The caller locks."""

    def __init__(self) -> None:
        self._segments: dict[int, list[Segment]] = {}
        self._lru: dict[int, OrderedDict[TierKey, Slot]] = {}
        self._by_key: dict[TierKey, Slot] = {}
        self._last_used: dict[Slot, int] = {}
        self._clock = 0
        self.segments_nbytes = 0
        """Bytes of all segments. This and `len` are single numbers, which may be read without the lock."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def keys(self) -> list[TierKey]:
        """Every key, in no order."""
        return list(self._by_key)

    def add_segment(self, memory: SegmentMemory, slot_nbytes: int) -> None:
        """New memory for blocks of this size."""
        self._segments.setdefault(slot_nbytes, []).append(Segment(memory, slot_nbytes))
        self.segments_nbytes += memory.nbytes

    def find(self, key: TierKey) -> Slot | None:
        """The slot of a block; asking does not count as use."""
        return self._by_key.get(key)

    def touch(self, key: TierKey, slot: Slot) -> None:
        """The block was used now."""
        self._clock += 1
        self._lru[slot.segment.slot_nbytes].move_to_end(key)
        self._last_used[slot] = slot.segment.last_used = self._clock

    def take_free(self, slot_nbytes: int) -> Slot | None:
        """A free slot with one user, of the fullest fitting segment first so that others can become wholly free."""
        candidates = [one for one in self._segments.get(slot_nbytes, ()) if one.free]
        if not candidates:
            return None
        segment = min(candidates, key=lambda one: len(one.free))
        return Slot(segment, segment.free.pop(), num_users=1)

    def publish(self, key: TierKey, slot: Slot) -> None:
        """The slot's bytes are whole: the block can be found from now on."""
        if key in self._by_key:
            raise StateError(f"host tier: {key.chain_hash.hex()[:16]} published twice")
        self._by_key[key] = slot
        self._lru.setdefault(slot.segment.slot_nbytes, OrderedDict())[key] = slot
        self.touch(key, slot)

    def forget(self, key: TierKey) -> bool:
        """The block cannot be found any more; its slot is free as soon as no copy runs over it."""
        slot = self._by_key.pop(key, None)
        if slot is None:
            return False
        del self._lru[slot.segment.slot_nbytes][key]
        del self._last_used[slot]
        slot.forgotten = True
        self._free_if_unused(slot)
        return True

    def release(self, slot: Slot, *, discard: bool = False) -> None:
        """A copy over the slot ended. `discard`: it was never published, so it is free now."""
        slot.num_users -= 1
        slot.forgotten = slot.forgotten or discard
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: Slot) -> None:
        if slot.forgotten and slot.num_users == 0:
            slot.segment.free.append(slot.index)

    def evict(self, slot_nbytes: int) -> bool:
        """Forget the least recently used block of this size that no copy runs over. False when there is none."""
        for key, slot in self._lru.get(slot_nbytes, {}).items():
            if slot.num_users == 0:
                return self.forget(key)
        return False

    def take_colder_segment(self, slot_nbytes: int) -> SegmentMemory | None:
        """Memory of another size's segment that was last used before our own oldest block, its blocks forgotten.

        None when there is none, or a copy runs over each. The caller closes it outside its lock.
        """
        own = next(iter(self._lru.get(slot_nbytes, {}).values()), None)
        own_age = self._last_used[own] if own else self._clock + 1
        others = [one for size, same in self._segments.items() if size != slot_nbytes for one in same]
        for segment in sorted(others, key=lambda one: one.last_used):
            if segment.last_used >= own_age:
                return None
            inside = [
                (key, slot) for key, slot in self._lru.get(segment.slot_nbytes, {}).items() if slot.segment is segment
            ]
            if len(inside) + len(segment.free) != segment.num_slots or any(slot.num_users for _, slot in inside):
                continue
            for key, _ in inside:
                self.forget(key)
            self._segments[segment.slot_nbytes].remove(segment)
            self.segments_nbytes -= segment.memory.nbytes
            return segment.memory
        return None

    def take_all(self) -> list[SegmentMemory]:
        """Forget everything; the memory of all segments, for the caller to close."""
        memories = [one.memory for same in self._segments.values() for one in same]
        for table in (self._segments, self._lru, self._by_key, self._last_used):
            table.clear()
        self.segments_nbytes = 0
        return memories

    def check_integrity(self) -> None:
        """Raises `StateError` naming the fault. Holds whenever no copy is running."""
        in_lru = sum(len(same) for same in self._lru.values())
        if not in_lru == len(self._by_key) == len(self._last_used):
            raise StateError(f"host tier: {in_lru} blocks in LRU order, {len(self._by_key)} by key")
        nbytes = sum(one.memory.nbytes for same in self._segments.values() for one in same)
        if nbytes != self.segments_nbytes:
            raise StateError(f"host tier: segments of {nbytes} bytes, counted {self.segments_nbytes}")
        capacity = sum(one.num_slots for same in self._segments.values() for one in same)
        free = sum(len(one.free) for same in self._segments.values() for one in same)
        if free + len(self._by_key) != capacity:
            raise StateError(f"host tier: {free} free + {len(self._by_key)} held != {capacity} slots")
