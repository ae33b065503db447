"""What travels on the session socket (unix, SOCK_SEQPACKET): one msgpack map per datagram, file descriptors beside it.

The client sends `Hello`; the daemon answers `Welcome` or `Refused`, later sends `SegmentGranted` or
`DeviceSegmentGranted` (always before the reply that first names a block of it), `SegmentRevoked` and `Goodbye`. To the
revoke of a device segment, and to nothing else, the client answers `SegmentClosed`. Who was granted device memory says
`Farewell` before it closes the socket. The end of the socket is the end of the session.
"""

from __future__ import annotations

import msgspec

from kvd.errors import InvalidRequest

SESSION_SOCKET = "session.sock"
REQUEST_SOCKET = "requests.sock"
"""Names within the runtime folder; a client in another mount namespace may see the folder elsewhere."""
TOKEN_NBYTES = 32
MAX_DATAGRAM_NBYTES = 16 << 10


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First datagram of a client. Everything in it is a claim; identity comes from the kernel."""

    protocol_min: int
    protocol_max: int
    client_version: str = ""
    pid_namespace: str = ""
    label: str = ""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The session stands. One descriptor comes along: the control page, read-only.

    `token` is the routing id that the DEALER must set before it connects; `credits` bounds its requests in flight.
    """

    protocol: int
    daemon_version: str
    epoch: int
    session: int
    token: bytes
    credits: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """No session; the socket is closed after this."""

    code: str
    message: str
    protocol_min: int
    protocol_max: int


class SegmentGranted(msgspec.Struct, tag="segment_granted", frozen=True):
    """One descriptor comes along: the segment's memory, mappable writable only when `writable`."""

    pool: int
    segment: int
    nbytes: int
    writable: bool


class DeviceSegmentGranted(msgspec.Struct, tag="device_segment_granted", frozen=True):
    """A segment of device memory; no descriptor comes along. Open `handle` once per process, when it is first needed.

    `handle` names the base of the allocation; blocks lie at offsets from there. It can be opened only in the daemon's
    PID namespace, and where the card of that UUID is visible; `pid` and `epoch` are the daemon's. The grant is for good
    until `SegmentRevoked`, and every process that has it may write: reserved blocks are writable, sealed ones must not
    be written.
    """

    pool: int
    segment: int
    nbytes: int
    device: str
    handle: bytes
    pid_namespace: str
    pid: int
    epoch: int


class SegmentRevoked(msgspec.Struct, tag="segment_revoked", frozen=True):
    """The segment is gone; no block of it is used by anyone. Close its descriptors.

    A device segment is freed only once every session it was granted to has answered `SegmentClosed`, or has ended with
    `Farewell` or with its process.
    """

    pool: int
    segment: int


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """The daemon ends the session; `code` is one of `kvd.errors`."""

    code: str
    message: str


class SegmentClosed(msgspec.Struct, tag="segment_closed", frozen=True):
    """Nothing in the client's process maps this revoked device segment any more, or ever did.

    Without it the memory stays taken until the session ends, so send it as soon as it is true.
    """

    pool: int
    segment: int


class Farewell(msgspec.Struct, tag="farewell", frozen=True):
    """The client closes the session next; nothing in its process maps the session's device memory or works on it.

    Without it the session's device memory waits for the end of the process.
    """


FromClient = Hello | SegmentClosed | Farewell
FromDaemon = Welcome | Refused | SegmentGranted | DeviceSegmentGranted | SegmentRevoked | Goodbye

_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_from_daemon = msgspec.msgpack.Decoder(FromDaemon)


def encode(message: FromClient | FromDaemon) -> bytes:
    """The datagram of one message."""
    return _encoder.encode(message)


def decode_from_client(datagram: bytes) -> FromClient:
    """Raises `InvalidRequest` and nothing else."""
    try:
        return _from_client.decode(datagram)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a message of a client: {error}") from error


def decode_from_daemon(datagram: bytes) -> FromDaemon:
    """Raises `InvalidRequest` and nothing else."""
    try:
        return _from_daemon.decode(datagram)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a session message: {error}") from error
