"""What a session is told: the reply to a request, at once or later, or why it failed."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping

from kvd.block import SessionId
from kvd.errors import KvdError, StateError
from kvd.protocol import requests
from kvd.protocol.replies import Failed, Reply
from kvd.service.attempts import Attempt
from kvd.service.outbox import Outgoing, SendReply
from kvd.service.sessions import Session

_log = logging.getLogger(__name__)


class Answers:
    """Puts replies into the outbox, and counts the failures among them. Loop thread only."""

    def __init__(
        self,
        *,
        outbox: deque[Outgoing],
        sessions: Mapping[SessionId, Session],
        counters: Counter[str],
        epoch: int,
    ) -> None:
        """`sessions` are those that live."""
        self._outbox = outbox
        self._sessions = sessions
        self._counters = counters
        self._epoch = epoch

    def send(self, session: Session, reply: Reply) -> None:
        """To a session that lives."""
        self._outbox.append(SendReply(session.id, reply))

    def send_late(self, session: Session, reply: Reply) -> None:
        """Nothing where the session has ended since it asked."""
        if session.id in self._sessions:
            self.send(session, reply)

    def fail_attempt(self, attempt: Attempt, error: KvdError) -> None:
        """`fail`, for a request that waited."""
        self.fail(attempt.session, attempt.request, error)

    def fail(self, session: Session, request: requests.Request, error: KvdError) -> None:
        """The one place where an error becomes what its session is told."""
        self._counters["failed_requests"] += 1
        if isinstance(error, StateError):
            _log.error("a defect in kvd: %s", error, exc_info=error)
        if isinstance(request, requests.Release) and not request.ack:
            self._counters["failed_releases"] += 1
            return
        self.send(session, Failed(request.request_id, self._epoch, error.code, str(error)))
