"""Which sessions are open; shared by all pools of one budget."""

from __future__ import annotations

from kvd.block import SessionId
from kvd.errors import NotOwned, StateError
from kvd.pool.quotas import Quotas, Session, User


class Sessions:
    """Open sessions and their users. What is not open holds nothing and gets nothing."""

    __slots__ = ("by_id", "quotas", "users")

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.by_id: dict[SessionId, Session] = {}
        self.users: dict[int, User] = {}

    def open(self, session_id: SessionId, uid: int) -> None:
        """A session begins, holding nothing."""
        if session_id in self.by_id:
            raise StateError(f"session {session_id} is open already")
        user = self.users.setdefault(uid, User(uid))
        user.num_sessions += 1
        self.by_id[session_id] = Session(session_id, user)

    def get(self, session_id: SessionId) -> Session:
        """Raises `NotOwned` for one that is not open: a late message of the dead must not bring them back."""
        session = self.by_id.get(session_id)
        if session is None:
            raise NotOwned(f"session {session_id} is not open")
        return session

    def close(self, session: Session) -> None:
        """The session ends; its leases gave everything back before."""
        del self.by_id[session.id]
        session.user.num_sessions -= 1
        if not session.user.num_sessions:
            del self.users[session.user.uid]

    def holders(self, pool_id: int, limit: int = 5) -> str:
        """Who holds blocks of a pool, in words for an error message; the largest first."""
        leases = [(session, lease) for session in self.by_id.values() if (lease := session.leases.get(pool_id))]
        holding = [(lease.num_distinct, session, lease) for session, lease in leases if lease.num_distinct]
        holding.sort(key=lambda entry: (-entry[0], entry[1].id))
        words = [
            f"session {session.id} (uid {session.user.uid}) {len(lease.held)} referenced {len(lease.reserved)} reserved"
            for _, session, lease in holding[:limit]
        ]
        if len(holding) > limit:
            words.append(f"{len(holding) - limit} more sessions")
        return "; ".join(words) or "no session"
