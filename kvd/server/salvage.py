"""Finds the request id in a frame that is no valid request, so that its sender can be told and need not wait."""

from __future__ import annotations

import struct

_PREAMBLE_NBYTES = 3


def request_id_of(frame: bytes | memoryview) -> int | None:
    """The second element of the msgpack array after the preamble, when it is an unsigned integer; else None.

    Looks at the first bytes only and builds nothing: a generic decoder would make megabytes of garbage into gigabytes
    of objects. Whatever the version byte says, every version of the protocol begins like this.
    """
    head = bytes(frame[: _PREAMBLE_NBYTES + 64])
    if head[:2] != b"KV":
        return None
    try:
        at = _after_array_header(head, _PREAMBLE_NBYTES)
        at = _after_tag(head, at)
        return _unsigned(head, at)
    except (IndexError, struct.error):
        return None


def _after_array_header(head: bytes, at: int) -> int:
    kind = head[at]
    if 0x92 <= kind <= 0x9F:  # fixarray of two or more
        return at + 1
    if kind == 0xDC:  # array 16
        return at + 3
    raise IndexError


def _after_tag(head: bytes, at: int) -> int:
    kind = head[at]
    if 0xA0 <= kind <= 0xBF:  # fixstr
        return at + 1 + (kind & 0x1F)
    if kind == 0xD9:  # str 8
        return at + 2 + head[at + 1]
    raise IndexError


def _unsigned(head: bytes, at: int) -> int | None:
    kind = head[at]
    if kind <= 0x7F:  # positive fixint
        return kind
    # uint 8, 16, 32, 64
    layout = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}.get(kind)
    if layout is None:
        return None
    value: int = struct.unpack_from(layout, head, at + 1)[0]
    return value
