"""What travels on the session socket (unix, SOCK_SEQPACKET): one msgpack map per datagram, file descriptors beside it.

The client sends `Hello` and then nothing more; the daemon answers `Welcome` or `Refused`, later sends
`SegmentGranted` (always before the reply that first names a block of it), `SegmentRevoked` and `Goodbye`.
The end of the socket is the end of the session.
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


class SegmentRevoked(msgspec.Struct, tag="segment_revoked", frozen=True):
    """The segment is gone; no block of it is mapped by anyone. Close its descriptors."""

    pool: int
    segment: int


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """The daemon ends the session; `code` is one of `kvd.errors`."""

    code: str
    message: str


FromClient = Hello
FromDaemon = Welcome | Refused | SegmentGranted | SegmentRevoked | Goodbye

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
        raise InvalidRequest(f"not a hello: {error}") from error


def decode_from_daemon(datagram: bytes) -> FromDaemon:
    """Raises `InvalidRequest` and nothing else."""
    try:
        return _from_daemon.decode(datagram)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not a session message: {error}") from error
