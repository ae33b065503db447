"""One ZeroMQ frame <-> one message: a 3-byte preamble, then msgpack. No I/O.

A request or reply is exactly one frame: `b"KV"`, the protocol version as one byte, then a msgpack array whose first
element is the message's tag. Block ids travel as packed little-endian u32, hashes as packed 32-byte strings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import msgspec

from kvd.block import BlockId
from kvd.errors import InvalidRequest, VersionMismatch
from kvd.protocol.replies import Reply
from kvd.protocol.requests import Request

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_MESSAGE_NBYTES = 4 << 20
"""Also libzmq's MAXMSGSIZE on the ROUTER: 65,536 hashes and their ids fit."""
BLOCK_ID_NBYTES = 4
MAX_IDS_PER_RELEASE = 1 << 13
"""In each list of one release, which then holds the loop for about 3 ms.

It gets no reply and takes no credit, so nothing else bounds what one client can make the others wait for.
"""
MAX_IDS_PER_MESSAGE = 1 << 16
"""In the list of one seal or retain, which are all or none and so cannot be sent in parts."""

_MAGIC = b"KV"
_PREAMBLE = _MAGIC + bytes([PROTOCOL_MAX])
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Reply) -> bytes:
    """The frame of one message."""
    return _PREAMBLE + _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """The request in a frame. Raises `VersionMismatch` or `InvalidRequest`; never anything else."""
    try:
        return _request_decoder.decode(_body(frame))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a request: {error}") from error


def decode_reply(frame: bytes | memoryview) -> Reply:
    """The reply in a frame. Raises `VersionMismatch` or `InvalidRequest`; never anything else."""
    try:
        return _reply_decoder.decode(_body(frame))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a reply: {error}") from error


def _body(frame: bytes | memoryview) -> memoryview:
    view = memoryview(frame)
    if len(view) < len(_PREAMBLE) or view[:2] != _MAGIC:
        raise InvalidRequest("a frame begins with 'KV' and a version")
    if not PROTOCOL_MIN <= view[2] <= PROTOCOL_MAX:
        raise VersionMismatch(f"protocol version {view[2]}; this side speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}")
    return view[len(_PREAMBLE) :]


def pack_block_ids(block_ids: Sequence[BlockId]) -> bytes:
    """Block ids as they travel."""
    return struct.pack(f"<{len(block_ids)}I", *block_ids)


def unpack_block_ids(packed: bytes) -> tuple[BlockId, ...]:
    """The inverse of `pack_block_ids`. Raises `InvalidRequest` when the length is not a multiple of 4."""
    if len(packed) % BLOCK_ID_NBYTES:
        raise InvalidRequest(f"{len(packed)} bytes of block ids are not a multiple of {BLOCK_ID_NBYTES}")
    return cast("tuple[BlockId, ...]", struct.unpack(f"<{len(packed) // BLOCK_ID_NBYTES}I", packed))
