"""Which session a message belongs to: live tokens, the kernel's word about their owners, tombstones."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator

from kvd.block import SessionId
from kvd.protocol.session import TOKEN_NBYTES
from kvd.server.channel import Channel
from kvd.server.kernel import PeerCredentials, parse_peer_address

MAX_TOMBSTONES = 4096
"""A message under an older token counts as unknown instead of late; it is dropped all the same."""
ADMISSIONS_PER_SESSION = 4
"""ZeroMQ connections that one session may make in its life; one is enough unless the first handshake fails."""


class User:
    """One uid with live sessions: how many, and how many requests of theirs are unanswered."""

    __slots__ = ("num_in_flight", "num_sessions")

    def __init__(self) -> None:
        self.num_sessions = 0
        self.num_in_flight = 0


class Session:
    """What the server keeps about one session. The service knows it by `id`, ZeroMQ by `token`."""

    __slots__ = (
        "channel",
        "credentials",
        "has_said_farewell",
        "id",
        "num_in_flight",
        "num_messages",
        "outbox",
        "peer_address",
        "pidfd",
        "token",
        "user",
    )

    def __init__(
        self, session: SessionId, token: bytes, credentials: PeerCredentials, channel: Channel, pidfd: int | None
    ) -> None:
        self.id = session
        self.token = token
        self.credentials = credentials
        self.peer_address = credentials.peer_address
        self.channel = channel
        self.pidfd = pidfd
        self.has_said_farewell = False
        """Nothing in its process uses device memory of the session any more."""
        self.num_in_flight = 0
        """Requests that will be answered and whose reply has not been handed to ZeroMQ."""
        self.user = User()
        """Of its uid, shared with that one's other sessions while it is among `Sessions`."""
        self.num_messages = 0
        """Whole messages that came from it, good or bad."""
        self.outbox: deque[tuple[int, bytes]] = deque()
        """Replies that cannot leave yet: (grants that must have left before, frame). Never more than its credits."""

    @property
    def process(self) -> tuple[int, int]:
        """(pid, uid)."""
        return self.credentials.pid, self.credentials.uid

    def took_request(self) -> None:
        """One more that will be answered."""
        self.num_in_flight += 1
        self.user.num_in_flight += 1

    def answered(self) -> None:
        """Its reply was handed to ZeroMQ, or is lost."""
        self.num_in_flight -= 1
        self.user.num_in_flight -= 1

    def is_peer(self, peer_address: str) -> bool:
        """Whether a message with this Peer-Address comes from the session's own process."""
        if peer_address == self.peer_address:
            return True
        peer = parse_peer_address(peer_address)
        if peer is None or (peer.pid, peer.uid) != (self.credentials.pid, self.credentials.uid):
            return False
        # The process has changed its group since it opened the session; it is the same process.
        self.peer_address = peer_address
        return True


class Sessions:
    """All live sessions by id, token and process. Loop thread only; every lookup is O(1)."""

    def __init__(self) -> None:
        self.by_token: dict[bytes, Session] = {}
        self._by_id: dict[SessionId, Session] = {}
        self._num_sessions: dict[tuple[int, int], int] = {}
        self._users: dict[int, User] = {}
        self._admissions: dict[tuple[int, int], int] = {}
        self._arrivals: dict[tuple[int, int], int] = {}
        self._tombstones: set[bytes] = set()
        self._tombstone_order: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session: SessionId) -> Session | None:
        """The session, unless it has ended."""
        return self._by_id.get(session)

    def num_of_process(self, credentials: PeerCredentials) -> int:
        """Live sessions of this process."""
        return self._num_sessions.get((credentials.pid, credentials.uid), 0)

    def num_of_uid(self, uid: int) -> int:
        """Live sessions of this user."""
        user = self._users.get(uid)
        return 0 if user is None else user.num_sessions

    def of_process(self, process: tuple[int, int]) -> list[Session]:
        """All sessions of (pid, uid). O(sessions): for rare use."""
        return [session for session in self if session.process == process]

    def num_messages(self) -> dict[tuple[int, int], int]:
        """Whole messages that came from each process with a session. O(sessions)."""
        counts: dict[tuple[int, int], int] = {}
        for session in self:
            counts[session.process] = counts.get(session.process, 0) + session.num_messages
        return counts

    @staticmethod
    def new_token() -> bytes:
        """32 random bytes. Never starts with a zero byte: libzmq's own routing ids do."""
        while (token := secrets.token_bytes(TOKEN_NBYTES))[0] == 0:
            pass
        return token

    def add(self, session: Session) -> None:
        """The session lives from now on."""
        process = session.process
        session.user = self._users.setdefault(session.credentials.uid, session.user)
        session.user.num_sessions += 1
        self.by_token[session.token] = session
        self._by_id[session.id] = session
        self._num_sessions[process] = self._num_sessions.get(process, 0) + 1
        self._admissions[process] = self._admissions.get(process, 0) + ADMISSIONS_PER_SESSION
        self._arrivals[process] = self._arrivals.get(process, 0) + 2 * ADMISSIONS_PER_SESSION

    def remove(self, session: Session) -> None:
        """The session is over; its token is a tombstone and never valid again."""
        process = session.process
        del self.by_token[session.token]
        del self._by_id[session.id]
        session.user.num_sessions -= 1
        session.user.num_in_flight -= session.num_in_flight
        if not session.user.num_sessions:
            del self._users[session.credentials.uid]
        # What is answered from here on is nobody's.
        session.user = User()
        self._num_sessions[process] -= 1
        if not self._num_sessions[process]:
            del self._num_sessions[process]
            del self._admissions[process]
            del self._arrivals[process]
        self._tombstones.add(session.token)
        self._tombstone_order.append(session.token)
        if len(self._tombstone_order) > MAX_TOMBSTONES:
            self._tombstones.discard(self._tombstone_order.popleft())

    def was_ended(self, token: bytes) -> bool:
        """Whether this is the token of a session that ended not too long ago."""
        return token in self._tombstones

    def admit(self, peer_address: str) -> bool:
        """Whether a process may end one more ZeroMQ handshake: it has a session, and has not ended too many."""
        peer = parse_peer_address(peer_address)
        return peer is not None and _take_one(self._admissions, (peer.pid, peer.uid))

    def welcome(self, process: tuple[int, int]) -> bool:
        """Whether a process may make one more ZeroMQ connection, handshake or not."""
        return _take_one(self._arrivals, process)


def _take_one(allowances: dict[tuple[int, int], int], process: tuple[int, int]) -> bool:
    if allowances.get(process, 0) <= 0:
        return False
    allowances[process] -= 1
    return True
