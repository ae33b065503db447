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


def tenant_of(identity: Identity, isolation: Isolation, shared_gid: int | None = None) -> str:
    """The wall a session lives behind: its user, or a group. Goes into every namespace digest.

    `shared_gid` is the group whose members may connect: they are one tenant, whatever their primary groups are. None
    goes by the primary group.
    """
    if isolation == "uid":
        return f"uid:{identity.uid}"
    return f"gid:{identity.gid if shared_gid is None else shared_gid}"
