"""Host memory: sealed segments that processes map, a stock of them made ahead, and the control page.

`segment` is one memfd, `stock` the thread that makes them within the budget, `available` what the machine can still
give, `control_page` the daemon's side of `kvd.protocol.control_page`.
"""

from kvd.memory.available import (
    auto_budget_nbytes,
    available_memory_nbytes,
    check_budget,
    free_huge_pages_nbytes,
    reserve_nbytes,
)
from kvd.memory.control_page import ControlPage
from kvd.memory.segment import HostSegment
from kvd.memory.stock import HugePages, Prefault, SegmentStock

__all__ = [
    "ControlPage",
    "HostSegment",
    "HugePages",
    "Prefault",
    "SegmentStock",
    "auto_budget_nbytes",
    "available_memory_nbytes",
    "check_budget",
    "free_huge_pages_nbytes",
    "reserve_nbytes",
]
