"""What a session knows of a namespace that it has opened: its handle, and where the pool's memory is."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from kvd.block import HOST
from kvd.errors import EngineUnsupported
from kvd.hashing import Namespace
from kvd.protocol.replies import CacheOpened
from kvd_client.memory import device_imports
from kvd_client.memory.compute_device import is_elsewhere, shown_on
from kvd_client.memory.device_segments import DevicePoolMemory
from kvd_client.memory.device_views import unseen
from kvd_client.memory.segments import PoolMemory
from kvd_client.memory.tensors import import_torch

Mode = Literal["mapped", "staged"]
_log = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a caller asks for: a namespace, and where its pool shall be."""

    namespace: Namespace
    device: str = ""
    """"" as the daemon's rules say, "host", or a card's UUID."""
    staged: bool = False
    """Host memory in any case, beside the card where the pool is on one."""
    ask_only: bool = False
    """No sequence is wanted, so it does not matter whether this process could map one."""
    computes_on: str = ""
    """A `device_name` where the sequences are attended over; "" for wherever the pool is."""


@dataclass(frozen=True, slots=True)
class OpenedCache:
    """A namespace as this session knows it."""

    spec: CacheSpec
    handle: int
    digest: bytes
    memory: PoolMemory | DevicePoolMemory
    device: str = HOST
    """"host", or the card's UUID."""
    staged_from: str = ""
    """The UUID of the card whose host pool this is."""

    @property
    def namespace(self) -> Namespace:
        """What must be equal for KV to be exchangeable."""
        return self.spec.namespace

    @property
    def mode(self) -> Mode:
        """Whether this process maps the pool itself, or the host pool beside a card."""
        return "staged" if self.staged_from else "mapped"


def why_not_mapped(reply: CacheOpened, computes_on: str) -> str | None:
    """Why this process cannot use the pool where it is, in a sentence; None when it can, as far as is known.

    Imports torch for a pool on a card.
    """
    if reply.device == HOST:
        return None
    reason = device_imports.refusal(reply.device, reply.pid_namespace)
    if reason is not None:
        return reason
    try:
        import_torch()
    except EngineUnsupported:
        return f"the daemon's memory is on {reply.device}, and there is no torch in this process to show it"
    shown = shown_on(reply.device)
    if shown is None:
        return unseen(reply.device)
    return f"they are attended over on {computes_on}" if is_elsewhere(computes_on, shown) else None


def tell_staged(device: str, reason: str) -> None:
    """Says, once in this process for each reason, that host memory is used instead of a card's."""
    _tell(f"kvd: blocks on {device} are used through host memory: {reason}")


def tell_copied(computes_on: str) -> None:
    """Says, once in this process, that blocks in host memory are copied to a card."""
    _tell(f"kvd: blocks in host memory are copied to {computes_on}, where they are attended over")


def _tell(sentence: str) -> None:
    if sentence not in _told:
        _told.add(sentence)
        _log.warning("%s", sentence)
