"""What the service wants sent: plain items in one queue, in the order in which they must leave."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.block import SessionId
from kvd.protocol.replies import Reply
from kvd.protocol.session import DeviceSegmentGranted, SegmentGranted, SegmentRevoked


@dataclass(frozen=True, slots=True)
class SendReply:
    """One reply, over ZeroMQ, to the session's DEALER."""

    session: SessionId
    message: Reply


@dataclass(frozen=True, slots=True)
class SendGrant:
    """What opens a segment, over the session socket; it leaves before the reply that follows it in the queue.

    `descriptor`, None for a segment of a card, belongs to the segment: send it (the kernel duplicates it), never close
    it. It is valid until the next call into the service, so a server that cannot send it at once keeps a duplicate.
    """

    session: SessionId
    message: SegmentGranted | DeviceSegmentGranted
    descriptor: int | None


@dataclass(frozen=True, slots=True)
class SendRevoke:
    """A segment is gone, over the session socket."""

    session: SessionId
    message: SegmentRevoked


Outgoing = SendReply | SendGrant | SendRevoke
