"""How much memory, in segments of what size, when the configuration leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from kvd.block import PAGE_NBYTES
from kvd.config.schema import Memory
from kvd.cuda import SEGMENT_GRANULE_NBYTES
from kvd.errors import CudaOutOfMemory
from kvd.memory import auto_budget_nbytes, check_budget

MIN_AUTO_SEGMENT_NBYTES = 16 << 20
MAX_AUTO_SEGMENT_NBYTES = 256 << 20
SEGMENTS_PER_BUDGET = 64
"""Fine enough for several pools to share a budget, few enough for each client to hold a descriptor of every one."""

SEGMENTS_PER_CARD = 16
MAX_CARD_SEGMENT_NBYTES = 1 << 30
"""Every client opens each segment it uses, at about 10 ms: fewer and larger ones than in host memory."""

DESCRIPTORS_PER_SESSION = 4
"""Session socket, pidfd, ZeroMQ connection, and one to spare."""
DESCRIPTORS_PER_SEGMENT = 2
"""The writable and the read-only one, in a pool or in the host tier."""
DESCRIPTORS_PER_COPIED_SEGMENT = DESCRIPTORS_PER_SEGMENT + 1
"""Python's mmap keeps one of its own, from the first copy of a block of the pool's segment to or from a tier."""
DESCRIPTORS_BESIDES = 600
"""Connections that have not said hello, what `kvd.server.headroom` keeps free, and the daemon's own few."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Both whole pages, the budget at least one segment."""

    budget_nbytes: int
    segment_nbytes: int


def decide_sizes(memory: Memory, available_nbytes: int) -> Sizes:
    """Fills in what is "auto". Raises `OutOfMemory` for a budget larger than the memory available."""
    if isinstance(memory.budget, int):
        check_budget(memory.budget, available_nbytes)
        segment_nbytes = _segment_nbytes(memory, memory.budget)
        return Sizes(memory.budget, segment_nbytes)
    segment_nbytes = _segment_nbytes(memory, auto_budget_nbytes(available_nbytes, PAGE_NBYTES))
    return Sizes(auto_budget_nbytes(available_nbytes, segment_nbytes), segment_nbytes)


def decide_card_sizes(memory: Memory, free_nbytes: int, total_nbytes: int) -> Sizes:
    """The same for a card with that much memory. Raises `CudaOutOfMemory` for a budget that it could never hold."""
    usable_nbytes = max(0, total_nbytes - memory.reserve_nbytes)
    budget = memory.budget
    if not isinstance(budget, int):
        budget = auto_budget_nbytes(max(0, free_nbytes - memory.reserve_nbytes), SEGMENT_GRANULE_NBYTES)
    elif budget > usable_nbytes:
        raise CudaOutOfMemory(
            f"a memory budget of {budget >> 20} MiB is more than the {usable_nbytes >> 20} MiB that the card has beside"
            f" the reserve of {memory.reserve_nbytes >> 20} MiB; lower memory.budget or memory.reserve_nbytes"
        )
    if isinstance(memory.segment, int):
        wished = memory.segment
    else:
        power_of_two = 1 << max(0, (budget // SEGMENTS_PER_CARD).bit_length() - 1)
        wished = min(max(power_of_two, MIN_AUTO_SEGMENT_NBYTES), MAX_CARD_SEGMENT_NBYTES, budget)
    segment_nbytes = max(1, -(-wished // SEGMENT_GRANULE_NBYTES)) * SEGMENT_GRANULE_NBYTES
    # A whole segment at least: less than that is no budget on a card.
    return Sizes(max(budget, segment_nbytes), segment_nbytes)


def decide_host_sizes(memory: Memory, available_nbytes: int) -> Sizes:
    """For the pools in host memory beside a card; a budget of 0 where there are to be none.

    Raises `OutOfMemory` for a budget larger than the memory available.
    """
    if memory.host.budget == 0:
        return Sizes(0, PAGE_NBYTES)
    beside = structs.replace(memory, budget=memory.host.budget)
    if isinstance(memory.segment, int) and isinstance(memory.host.budget, int):
        beside = structs.replace(beside, segment=min(memory.segment, memory.host.budget // PAGE_NBYTES * PAGE_NBYTES))
    return decide_sizes(beside, available_nbytes)


def session_capacity(max_descriptors: int, sizes: Sizes, *, has_tiers: bool = False, host_tier_nbytes: int = 0) -> int:
    """How many sessions the descriptors are enough for, beside those of every segment; at least one."""
    per_segment = DESCRIPTORS_PER_COPIED_SEGMENT if has_tiers else DESCRIPTORS_PER_SEGMENT
    num_own = DESCRIPTORS_BESIDES + sizes.budget_nbytes // sizes.segment_nbytes * per_segment
    if host_tier_nbytes:
        # A host tier smaller than a segment is one smaller segment.
        num_own += max(1, host_tier_nbytes // sizes.segment_nbytes) * DESCRIPTORS_PER_SEGMENT
    return max(1, (max_descriptors - num_own) // DESCRIPTORS_PER_SESSION)


def _segment_nbytes(memory: Memory, budget_nbytes: int) -> int:
    if isinstance(memory.segment, int):
        return memory.segment
    power_of_two = 1 << max(0, (budget_nbytes // SEGMENTS_PER_BUDGET).bit_length() - 1)
    wished = min(max(power_of_two, MIN_AUTO_SEGMENT_NBYTES), MAX_AUTO_SEGMENT_NBYTES)
    return min(wished, budget_nbytes - budget_nbytes % PAGE_NBYTES)
