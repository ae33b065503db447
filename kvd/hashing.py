"""Names of KV by content: namespace digests and chain hashes. Shared by the daemon and the client library.

A chain hash is SHA-256 over (parent hash, token ids of one block). The first block's parent is the namespace digest,
so a hash names the model, layout, adapter, tenant and every token before it. Everything hashed is canonical bytes:
token ids as little-endian u32, every other field tagged and length-prefixed. No seed, no pickle, no `hash()`: two
interpreters, two machines, two years apart agree. PROTOCOL.md has a worked example.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from itertools import chain
from typing import SupportsIndex, cast

import msgspec

from kvd.block import HASH_NBYTES, ChainHash, NamespaceDigest
from kvd.errors import InvalidRequest, InvalidTokens
from kvd.layout import LAYOUT_VERSION, KVLayout

TOKEN_NBYTES = 4
_ROOT_TAG = b"kvd namespace 1"
MAX_FIELD_NBYTES = 4096
_INTEGERS = list[int]
_ONE_HASH = struct.Struct(f"{HASH_NBYTES}s")
_MANY_HASHES = struct.Struct(f"{HASH_NBYTES}s" * 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What must be equal for KV to be exchangeable, the tenant excepted, which only the daemon may name.

    `model` is the weights' digest or a revision the user vouches for; `engine` names the family and the version of
    its arrangement of a block; `positional` is the rope or other positional configuration in canonical text;
    `adapter` is a digest of the adapter's content, never its name; `salt` separates what the caller wants separate.
    """

    model: str
    layout: KVLayout
    engine: str = "raw/1"
    positional: str = ""
    adapter: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequest("a namespace needs a model: its weights digest, or a name with a revision")
        for name in ("model", "engine", "positional", "adapter", "salt"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value.encode("utf-8", "surrogatepass")) > MAX_FIELD_NBYTES:
                raise InvalidRequest(f"namespace field {name} must be text of at most {MAX_FIELD_NBYTES} bytes")

    def canonical_fields(self) -> list[tuple[bytes, bytes]]:
        """(tag, value) of every field in the order they are hashed; numbers as decimal text."""
        layout_fields = [(f"layout.{f.name}", str(getattr(self.layout, f.name))) for f in fields(KVLayout)]
        own = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "layout"]
        everything = [*own, ("layout.version", str(LAYOUT_VERSION)), *layout_fields]
        return [(tag.encode(), value.encode("utf-8", "surrogatepass")) for tag, value in everything]


def namespace_digest(namespace: Namespace, tenant: str) -> NamespaceDigest:
    """SHA-256 over every field of the namespace and the tenant.

    Each field is u32 tag length, tag, u32 value length, value; hence no two lists of fields share their bytes
    ("ab","c" and "a","bc" differ, and a salt never equals an adapter of the same text).
    """
    digest = hashlib.sha256(_ROOT_TAG)
    for tag, value in [*namespace.canonical_fields(), (b"tenant", tenant.encode())]:
        digest.update(struct.pack("<I", len(tag)) + tag + struct.pack("<I", len(value)) + value)
    return NamespaceDigest(digest.digest())


def encode_tokens(token_ids: Iterable[SupportsIndex]) -> bytes:
    """Token ids as little-endian u32, 4 bytes each.

    Takes lists, tuples and other iterables of integers, one-dimensional numpy arrays and torch tensors of an integer
    type (a torch tensor of shape [1, n] too). Raises `InvalidTokens` for anything else: negative ids, ids above
    2**32-1, floats, bools, and collections without an order.
    """
    values: list[SupportsIndex]
    if type(token_ids) is list:
        values = token_ids
    elif isinstance(token_ids, (bytes, bytearray, memoryview, str)):
        raise InvalidTokens(f"token ids must be integers, not {type(token_ids).__name__}")
    elif isinstance(token_ids, (AbstractSet, Mapping)):
        raise InvalidTokens(f"token ids must be in a sequence; a {type(token_ids).__name__} has no order to rely on")
    elif hasattr(token_ids, "dtype") and hasattr(token_ids, "tolist"):
        values = _array_values(token_ids)
    else:
        try:
            iterator = iter(token_ids)
        except TypeError as error:
            raise InvalidTokens(f"token ids must be integers in a sequence, not {type(token_ids).__name__}") from error
        values = list(iterator)
    packed = array("I")
    try:
        # No id may be lost silently: array("I") takes __index__ only, and refuses what does not fit 32 bits.
        packed.fromlist(cast("list[int]", values))
    except OverflowError as error:
        raise InvalidTokens("a token id is negative or above 2**32-1") from error
    except TypeError as error:
        raise InvalidTokens(f"token ids must be integers in 0 .. 2**32-1 ({error})") from error
    if sys.byteorder == "big":
        packed.byteswap()
    if _has_bool(values):
        raise InvalidTokens("token ids must be integers, not bools")
    return packed.tobytes()


def _has_bool(values: list[SupportsIndex]) -> bool:
    try:
        # Strict: passes plain ints only. Four times as quick as looking at each type in Python.
        msgspec.convert(values, _INTEGERS)
    except msgspec.ValidationError:
        return any(issubclass(kind, bool) for kind in set(map(type, values)))
    return False


def _array_values(token_ids: object) -> list[SupportsIndex]:
    """The values of a numpy array or torch tensor, told apart by their attributes so that neither is imported."""
    dtype, shape = str(token_ids.dtype), tuple(token_ids.shape)  # type: ignore[attr-defined]
    if "int" not in dtype:
        raise InvalidTokens(f"token ids must be integers, not {dtype}")
    if len(shape) == 2 and shape[0] == 1:
        token_ids = token_ids[0]  # type: ignore[index]
    elif len(shape) != 1:
        raise InvalidTokens(f"token ids must have one dimension (or [1, n]), not shape {list(shape)}")
    return cast("list[SupportsIndex]", token_ids.tolist())  # type: ignore[attr-defined]


def chain_hashes(parent: NamespaceDigest | ChainHash, tokens: bytes, block_tokens: int) -> list[ChainHash]:
    """The chain hash of every full block in `tokens` (as `encode_tokens` gives them), the partial last one left out.

    `parent` is the namespace digest, or the hash of the block before the first of these. Length of the result:
    number of tokens // block_tokens.
    """
    sha256 = hashlib.sha256
    block_nbytes = block_tokens * TOKEN_NBYTES
    num_blocks = len(tokens) // block_nbytes
    # One unpack of all blocks and one comprehension: the loop around SHA-256 then costs a fifth of SHA-256 itself.
    blocks = struct.unpack_from(f"{block_nbytes}s" * num_blocks, tokens)
    digest: bytes = parent
    hashes = [digest := sha256(digest + block).digest() for block in blocks]
    return cast("list[ChainHash]", hashes)


def pack_hashes(hashes: Iterable[ChainHash]) -> bytes:
    """Hashes as they travel: 32 bytes each, one after the other."""
    return b"".join(hashes)


def unpack_hashes(packed: bytes) -> list[ChainHash]:
    """The inverse of `pack_hashes`. Raises `InvalidRequest` when the length is not a multiple of 32."""
    if len(packed) % HASH_NBYTES:
        raise InvalidRequest(f"{len(packed)} bytes of hashes are not a multiple of {HASH_NBYTES}")
    cut = len(packed) - len(packed) % _MANY_HASHES.size
    # Many at a step: a third of the time that one at a step takes.
    hashes: list[bytes] = list(chain.from_iterable(_MANY_HASHES.iter_unpack(packed[:cut])))
    hashes += [part for (part,) in _ONE_HASH.iter_unpack(packed[cut:])]
    return cast("list[ChainHash]", hashes)


__all__ = [
    "Namespace",
    "chain_hashes",
    "encode_tokens",
    "namespace_digest",
    "pack_hashes",
    "unpack_hashes",
]
