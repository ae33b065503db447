"""Memory that processes map: segments of host memory and of cards, stocks of them made ahead, and the control page.

`segment` is one memfd, `stock` the thread that makes them within the budget, `available` what the machine can still
give; `device_segment`, `device_stock` and `device` are the same for a card, `device_copies` copies there and back,
`card_memory` is all of that, which may be released and restored, and
`block_memory` is a block wherever it lies. `control_page` is the daemon's side of `kvd.protocol.control_page`.
"""

from kvd.memory.available import (
    auto_budget_nbytes,
    available_memory_nbytes,
    check_budget,
    free_huge_pages_nbytes,
    reserve_nbytes,
)
from kvd.memory.block_memory import BlockMemory, DeviceBlock, HostBlock
from kvd.memory.card_memory import CardMemory
from kvd.memory.control_page import ControlPage
from kvd.memory.device import Choice, choose_device
from kvd.memory.device_copies import CopyEngine
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.device_stock import DeviceStock
from kvd.memory.making import Prefault
from kvd.memory.segment import HostSegment
from kvd.memory.stock import HugePages, SegmentStock

__all__ = [
    "BlockMemory",
    "CardMemory",
    "Choice",
    "ControlPage",
    "CopyEngine",
    "DeviceBlock",
    "DeviceSegment",
    "DeviceStock",
    "HostBlock",
    "HostSegment",
    "HugePages",
    "Prefault",
    "SegmentStock",
    "auto_budget_nbytes",
    "available_memory_nbytes",
    "check_budget",
    "choose_device",
    "free_huge_pages_nbytes",
    "reserve_nbytes",
]
