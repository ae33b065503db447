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
from kvd_client.memory.device_segments import DevicePoolMemory
from kvd_client.memory.device_views import find_torch_device, unseen
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


def why_not_mapped(reply: CacheOpened) -> str | None:
    """Why this process cannot map the pool that the daemon names, in a sentence; None when it can, as far as is known.

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
    device = device_imports.shared_driver().find(reply.device)
    if find_torch_device(reply.device) is None and not (device and device.is_cpu_touchable):
        return unseen(reply.device)
    return None


def tell_staged(device: str, reason: str) -> None:
    """Says, once in this process for each reason, that host memory is used instead of a card's."""
    if reason not in _told:
        _told.add(reason)
        _log.warning("kvd: blocks on %s are used through host memory: %s", device, reason)
