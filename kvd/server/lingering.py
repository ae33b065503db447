"""Sessions that ended while their process lives, and may still work on a card with what they held there.

The socket of a process that is killed may close before the driver has stopped what the process runs on a card; its end
is told by the pidfd, which the kernel makes readable only after every descriptor of it has been closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvd.block import SessionId
from kvd.server.kernel import PeerCredentials
from kvd.server.watch import Watch

LINGER_S = 10.0
"""How long what a session had reserved waits for the end of its process. What is killed ends within moments; a process
that goes on living has been told that its session is over, and computes nothing there that takes so long."""


@dataclass(slots=True)
class _Lingerer:
    credentials: PeerCredentials
    pidfd: int
    until_s: float | None
    """When it has lingered for long enough; None once it was told so."""


class Lingering:
    """Loop thread only. `close()` is idempotent and calls nobody.

    `overdue(session)` is called once when its process has lived on for `LINGER_S`, `gone(session)` once at its end.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        overdue: Callable[[SessionId], None],
        gone: Callable[[SessionId], None],
        clock: Callable[[], float],
    ) -> None:
        self._watch = watch
        self._overdue = overdue
        self._gone = gone
        self._clock = clock
        self._lingerers: dict[SessionId, _Lingerer] = {}  # in order of arrival, so the first deadline is the next

    def __len__(self) -> int:
        return len(self._lingerers)

    def num_of_process(self, peer: PeerCredentials) -> int:
        """Sessions of this process. O(sessions)."""
        return sum(one.credentials[:2] == peer[:2] for one in self._lingerers.values())

    def num_of_uid(self, uid: int) -> int:
        """Sessions of this user. O(sessions)."""
        return sum(one.credentials.uid == uid for one in self._lingerers.values())

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        return next((one.until_s for one in self._lingerers.values() if one.until_s is not None), None)

    def add(self, session: SessionId, credentials: PeerCredentials, pidfd: int) -> None:
        """From now on the pidfd is this one's, which nobody watches."""
        self._lingerers[session] = _Lingerer(credentials, pidfd, self._clock() + LINGER_S)
        self._watch.add(pidfd, lambda: self._on_exit(session))

    def expire(self, now_s: float) -> None:
        """Tells of those whose time is over."""
        for session, one in list(self._lingerers.items()):
            if one.until_s is None:
                continue
            if one.until_s > now_s:
                break
            one.until_s = None
            self._overdue(session)

    def _on_exit(self, session: SessionId) -> None:
        self._drop(session)
        self._gone(session)

    def _drop(self, session: SessionId) -> None:
        pidfd = self._lingerers.pop(session).pidfd
        self._watch.remove(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """Waits for nobody any more."""
        for session in list(self._lingerers):
            self._drop(session)
