"""The bytes of one stored block: a 64-byte header and the payload, in one value.

| offset | bytes | field |
|---|---|---|
| 0 | 3 | magic, `4b 56 44` ("KVD") |
| 3 | 1 | format version, 1 |
| 4 | 1 | codec: 0 raw, 1 lz4 block, 2 zstd frame |
| 5 | 1 | byte shuffle: bytes per number before encoding; 0 or 1 means not shuffled |
| 6 | 6 | first bytes of the namespace digest |
| 12 | 4 | raw length: bytes of the block when decoded, unsigned little-endian |
| 16 | 32 | chain hash of the block |
| 48 | 16 | xxh3-128 (canonical, big-endian) of bytes 0 .. 47 followed by the payload as stored |

The checksum covers the header too, so that no flipped bit there can turn into a wrong decoding. It is not a secret:
it catches accidents; who can write to the store is trusted as the tenant's writers are.

Worked example: block `00 01 02 03` (raw), namespace digest 32 times `11`, chain hash 32 times `22`:

    4b 56 44 01 00 00 11 11 11 11 11 11 04 00 00 00
    22 22 22 22 22 22 22 22 22 22 22 22 22 22 22 22
    22 22 22 22 22 22 22 22 22 22 22 22 22 22 22 22
    c8 bb 7b cb 62 7c 41 32 2c a6 ad 63 5c 0d a6 07
    00 01 02 03
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvd.block import ChainHash
from kvd.errors import BlockCorrupt
from kvd.tiers.base import TierKey

HEADER_NBYTES = 64
MAGIC = b"KVD"
FORMAT_VERSION = 1
NAMESPACE_PREFIX_NBYTES = 6

_FIELDS = struct.Struct("<3sBBB6sI32s")
_CHECKED_NBYTES = _FIELDS.size  # 48; the checksum follows


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """A header whose fields make sense for the key that was asked; its payload is yet to be verified."""

    codec: int
    shuffle: int
    raw_nbytes: int
    checked: bytes
    checksum: bytes

    def verify(self, payload: memoryview) -> None:
        """Raises `BlockCorrupt` unless header and payload are what was written. Lets the interpreter lock go."""
        if _checksum(self.checked, payload) != self.checksum:
            raise BlockCorrupt("the value's checksum is wrong", cause="bad-checksum")


def encode_header(key: TierKey, payload: memoryview, *, codec: int, shuffle: int, raw_nbytes: int) -> bytes:
    """The 64 bytes that go before `payload`, which is already encoded."""
    checked = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        codec,
        shuffle,
        key.namespace[:NAMESPACE_PREFIX_NBYTES],
        raw_nbytes,
        key.chain_hash,
    )
    return checked + _checksum(checked, payload)


def decode_header(header: bytes, key: TierKey, *, raw_nbytes: int) -> ValueHeader:
    """Check a value's first 64 bytes against the key they were found under and the length of the block wanted.

    Raises `BlockCorrupt`, with a cause for each way of being wrong.
    """
    magic, version, codec, shuffle, namespace, raw, chain_hash = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise BlockCorrupt("the value does not begin with kvd's magic bytes", cause="foreign-value")
    if version != FORMAT_VERSION:
        raise BlockCorrupt(f"the value has format version {version}, not {FORMAT_VERSION}", cause="bad-version")
    if namespace != key.namespace[:NAMESPACE_PREFIX_NBYTES] or ChainHash(chain_hash) != key.chain_hash:
        raise BlockCorrupt("the value is that of another block", cause="wrong-block")
    if raw != raw_nbytes:
        raise BlockCorrupt(f"the value holds {raw} bytes, the block has {raw_nbytes}", cause="bad-length")
    return ValueHeader(codec, shuffle, raw, header[:_CHECKED_NBYTES], header[_CHECKED_NBYTES:HEADER_NBYTES])


def _checksum(checked: bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(checked)
    state.update(payload)
    return state.digest()
