"""Who a session is: what the kernel says about the peer, and the tenant that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Isolation = Literal["group", "uid"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The peer's SO_PEERCRED. Nothing in here comes from a message."""

    pid: int
    uid: int
    gid: int


def tenant_of(identity: Identity, isolation: Isolation) -> str:
    """The wall a session lives behind: its user, or its (primary) group. Goes into every namespace digest."""
    return f"uid:{identity.uid}" if isolation == "uid" else f"gid:{identity.gid}"
