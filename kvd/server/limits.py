"""How much one session, one user and all together may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.errors import Overloaded
from kvd.server.kernel import PeerCredentials
from kvd.server.lingering import Lingering
from kvd.server.sessions import Session, Sessions


@dataclass(slots=True, kw_only=True)
class Limits:
    """Shared by those who check them; what a reload may change is changed in place. Loop thread only.

    `uid_sessions` and `uid_requests` are of one user over all of its sessions; None is no limit.
    """

    credits: int
    """Requests that one session may have in flight."""
    sessions: int
    uid_sessions: int | None = None
    uid_requests: int | None = None

    def check_session(self, sessions: Sessions, lingering: Lingering, peer: PeerCredentials) -> None:
        """Raises `Overloaded` when this process may not open one more session. Those that linger count, too."""
        if len(sessions) + len(lingering) >= self.sessions:
            raise Overloaded(f"all {self.sessions} sessions are taken; raise limits.sessions")
        if sessions.num_of_process(peer) + lingering.num_of_process(peer) >= max(4, self.sessions // 4):
            raise Overloaded(f"process {peer.pid} alone has a quarter of all sessions; close some")
        num_of_uid = sessions.num_of_uid(peer.uid) + lingering.num_of_uid(peer.uid)
        if self.uid_sessions is not None and num_of_uid >= self.uid_sessions:
            raise Overloaded(
                f"uid {peer.uid} has all {self.uid_sessions} sessions that one user may have; close some, or raise "
                f"limits.uid_sessions"
            )

    def check_request(self, session: Session) -> None:
        """Raises `Overloaded` when the session, or its user, has as many requests in flight as it may."""
        if session.num_in_flight >= self.credits:
            raise Overloaded(f"more than the {self.credits} requests in flight granted")
        if self.uid_requests is not None and session.user.num_in_flight >= self.uid_requests:
            raise Overloaded(
                f"more than the {self.uid_requests} requests in flight that one user may have (limits.uid_requests)"
            )
