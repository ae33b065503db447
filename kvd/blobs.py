"""The format of a blob: a byte string of any length over many blocks, found by its key. Shared with the client library.

A blob is one small *head* block and the *body* blocks that hold its bytes, in two namespaces of one name. The head's
hash follows from the key; it tells length and checksum, and the hashes of the body's blocks follow from these. So two
contents of one key never share a block, one content under many keys is stored once, and a blob is found only through
its head, which is sealed after the body. PROTOCOL.md has the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import CorruptBlock, InvalidRequest
from kvd.hashing import Namespace
from kvd.layout import KVLayout

HEAD_ENGINE: Final = "blob-head/1"
BODY_ENGINE: Final = "blob/1"
DEFAULT_BLOCK_NBYTES: Final = 1 << 20
"""Large enough that a hash and a message's share of a block cost nothing beside copying it, small enough that the
unused end of the last block does not matter beside a few MiB of state."""
MAX_KEY_NBYTES: Final = 4096
MAX_BLOCKS: Final = 1 << 16
"""Of one blob's body; and so many keys may be asked about at once: what one message can name."""
_PAGE_NBYTES: Final = 4096
_MAGIC: Final = b"KVDBLOB1"
_HEAD: Final = struct.Struct("<8sQ16s32s")
_CHECK: Final = struct.Struct("<Q")
HEAD_NBYTES: Final = _HEAD.size + _CHECK.size


def is_blob_engine(engine: str) -> bool:
    """Whether the blocks of such a namespace are parts of blobs."""
    return engine in (HEAD_ENGINE, BODY_ENGINE)


def layout_of(block_nbytes: int) -> KVLayout:
    """A block of so many bytes, written as the layout of a model whose tokens are pages.

    Raises `InvalidRequest` unless it is a number of pages that a layout can name.
    """
    num_pages, rest = divmod(block_nbytes, _PAGE_NBYTES)
    if rest or not 0 < num_pages <= 1 << 18:
        raise InvalidRequest(f"a block of a blob is 4096 bytes or a multiple of it, up to 1 GiB, not {block_nbytes}")
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=2048, dtype="float8_e4m3fn", block_tokens=num_pages)


def namespaces(name: str, *, salt: str = "", block_nbytes: int = DEFAULT_BLOCK_NBYTES) -> tuple[Namespace, Namespace]:
    """Those of the heads and of the bodies. Bodies in blocks of another size have other heads."""
    size = f"body blocks of {block_nbytes} bytes"
    head = Namespace(model=name, layout=layout_of(_PAGE_NBYTES), engine=HEAD_ENGINE, positional=size, salt=salt)
    return head, Namespace(model=name, layout=layout_of(block_nbytes), engine=BODY_ENGINE, salt=salt)


def head_hash(heads: NamespaceDigest, key: bytes) -> ChainHash:
    """The name of a blob's head. Raises `InvalidRequest` for a key that is empty, too long, or not bytes."""
    if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_NBYTES:
        raise InvalidRequest(f"the key of a blob is 1 to {MAX_KEY_NBYTES} bytes")
    return ChainHash(hashlib.sha256(b"kvd blob head 1" + heads + key).digest())


@dataclass(frozen=True, slots=True)
class BlobHead:
    """What a head block holds. Nothing in it is believed before `unpack` has compared its own checksum."""

    nbytes: int
    checksum: bytes
    """xxh3-128 of the content, big-endian."""

    def body_hashes(self, bodies: NamespaceDigest, block_nbytes: int) -> list[ChainHash]:
        """The names of the body's blocks, in their order. Raises `InvalidRequest` when one request cannot name them."""
        seed = b"kvd blob body 1" + bodies + self.checksum + struct.pack("<Q", self.nbytes)
        num_blocks = -(-self.nbytes // block_nbytes)
        if num_blocks > MAX_BLOCKS:
            raise InvalidRequest(f"a blob of {self.nbytes} bytes has more than {MAX_BLOCKS} blocks of {block_nbytes}")
        return [ChainHash(hashlib.sha256(seed + struct.pack("<Q", place)).digest()) for place in range(num_blocks)]

    def pack(self, name: ChainHash) -> bytes:
        """The first bytes of the head block of that name; the others are zero."""
        head = _HEAD.pack(_MAGIC, self.nbytes, self.checksum, name)
        return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))

    @classmethod
    def unpack(cls, packed: bytes, name: ChainHash) -> BlobHead:
        """The inverse. Raises `CorruptBlock` when this is not the head of that name, byte for byte."""
        head = packed[: _HEAD.size]
        if len(packed) < HEAD_NBYTES or packed[_HEAD.size : HEAD_NBYTES] != _CHECK.pack(xxhash.xxh3_64_intdigest(head)):
            raise CorruptBlock("the head of a blob differs from its checksum")
        magic, nbytes, checksum, named = _HEAD.unpack(head)
        if magic != _MAGIC or named != name:
            raise CorruptBlock("what lies under a blob's key is not its head")
        return cls(nbytes, checksum)
