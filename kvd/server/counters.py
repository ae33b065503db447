"""What the server counts; `kvd status` shows it, tests read it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class ServerCounters:
    """All count up from the daemon's start."""

    num_requests: int = 0  # well-formed requests of live sessions
    num_replies: int = 0  # replies handed to ZeroMQ
    num_sessions_opened: int = 0
    num_sessions_ended: int = 0  # for whatever reason; the next two are among them
    num_sessions_expelled: int = 0  # ended by the daemon: broken rules, or replies and grants never read
    num_exits_seen_by_pidfd: int = 0  # the process was gone although its session socket was still open somewhere
    num_sessions_refused: int = 0  # answered with Refused: version, limit, no hello
    num_hello_timeouts: int = 0  # connections closed because no Hello came, or to make room for newer ones
    num_peers_denied: int = 0  # ZeroMQ connections of processes without a session
    num_bad_frames: int = 0  # not one frame of a known message
    num_excess_frames: int = 0  # frames beyond the one that a message has
    num_unknown_tokens: int = 0  # messages whose routing id was never a token
    num_late_messages: int = 0  # messages under the token of an ended session
    num_wrong_peers: int = 0  # messages under a live token, but from another process than the session's
    num_overloaded: int = 0  # requests beyond the session's credits
    num_stalls: int = 0  # times a session's replies began to wait because it did not read
    num_unroutable: int = 0  # replies whose session's ZeroMQ connection was gone

    def as_dict(self) -> dict[str, int]:
        """Name -> value, for status."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
