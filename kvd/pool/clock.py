"""Logical time: what lets blocks of different pools be compared by age without reading a clock."""

from __future__ import annotations


class LogicalClock:
    """Counts releases over all pools of one budget."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        """A stamp later than every one before."""
        self.now += 1
        return self.now
