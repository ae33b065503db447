"""What a contiguous cache occupies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Bytes and token slots of one cache at one moment."""

    keys_nbytes: int
    """Of the keys written, all layers together."""
    values_nbytes: int
    """Of the values written."""
    shared_nbytes: int
    """Of the blocks that are sealed, so that other processes may hold them too: counted once for all of them."""
    reserved_nbytes: int
    """Of every block held, sealed or not, written or not: what the pool gives up for this cache."""
    num_slots_used: int
    """Tokens in the longest layer."""
    num_slots: int
    """Tokens that a layer may ever hold."""
