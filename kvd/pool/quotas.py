"""Sessions and users as the pools know them, and how much each may hold."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.block import SessionId
from kvd.errors import QuotaExceeded
from kvd.pool.leases import Lease


class User:
    """One uid with at least one open session."""

    __slots__ = ("held_nbytes", "num_sessions", "uid")

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.num_sessions = 0
        self.held_nbytes = 0
        """Sum over its sessions."""


class Session:
    """One open session: its user and its lease in every pool it used."""

    __slots__ = ("held_nbytes", "id", "leases", "user")

    def __init__(self, session_id: SessionId, user: User) -> None:
        self.id = session_id
        self.user = user
        self.leases: dict[int, Lease] = {}
        """By pool id."""
        self.held_nbytes = 0
        """Bytes of the distinct blocks it references or has reserved; a block shared within the session counts once."""

    def charge(self, nbytes: int) -> None:
        """The session holds `nbytes` more, or less when negative."""
        self.held_nbytes += nbytes
        self.user.held_nbytes += nbytes


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits on the bytes of distinct blocks held; None is none."""

    session_nbytes: int | None = None
    uid_nbytes: int | None = None

    def allow(self, session: Session, more_nbytes: int) -> bool:
        """Whether the session and its user may hold this much more."""
        return (self.session_nbytes is None or session.held_nbytes + more_nbytes <= self.session_nbytes) and (
            self.uid_nbytes is None or session.user.held_nbytes + more_nbytes <= self.uid_nbytes
        )

    def require(self, session: Session, more_nbytes: int) -> None:
        """Raises `QuotaExceeded` naming who holds how much, unless `allow`."""
        if self.allow(session, more_nbytes):
            return
        user = session.user
        if self.session_nbytes is not None and session.held_nbytes + more_nbytes > self.session_nbytes:
            who, held, limit = f"session {session.id}", session.held_nbytes, self.session_nbytes
        else:
            who = f"uid {user.uid} with {user.num_sessions} sessions"
            held, limit = user.held_nbytes, self.uid_nbytes or 0
        raise QuotaExceeded(f"{who} holds {held} bytes, wants {more_nbytes} more and may hold {limit}")
