"""How a block is packed before it is stored: as it is, lz4, or zstd, the latter two after a byte shuffle.

Shuffling puts all first bytes of the numbers together, then all second bytes: the exponents of neighbours resemble
each other, so they compress where the mantissas between them would hide that. A daemon reads every codec, whatever it
writes; the libraries of lz4 and zstd are optional (extra `codecs`) and looked for when first needed.
"""

from __future__ import annotations

import enum
import importlib
from types import ModuleType

from kvd.errors import BlockCorrupt, CodecUnavailable, ConfigError

_ZSTD_LEVEL = 1


class Codec(enum.IntEnum):
    """The byte in the value's header. Numbers are never used again for something else."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2


_LIBRARIES = {Codec.LZ4: "lz4.block", Codec.ZSTD: "zstandard"}


def codec_named(name: str) -> Codec:
    """The codec of a config value. Raises `ConfigError` when it is unknown or its library is not installed."""
    try:
        codec = Codec[name.upper()]
    except KeyError as error:
        known = ", ".join(one.name.lower() for one in Codec)
        raise ConfigError(f"codec {name!r} is not one of {known}") from error
    if codec is not Codec.RAW:
        try:
            _library(codec)
        except CodecUnavailable as error:
            raise ConfigError(str(error)) from error
    return codec


def encode(codec: Codec, data: memoryview, itemsize: int) -> tuple[Codec, int, memoryview]:
    """Pack a block: (codec really used, shuffle, payload).

    Where packing gains nothing the block is stored raw, and the payload is `data` itself: no copy.
    """
    if codec is Codec.RAW:
        return Codec.RAW, 0, data
    shuffle = itemsize if itemsize > 1 and len(data) % itemsize == 0 else 0
    planes = _shuffled(data, shuffle) if shuffle else bytes(data)
    library = _library(codec)
    if codec is Codec.LZ4:
        packed: bytes = library.compress(planes, store_size=False)
    else:
        packed = library.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(planes)
    if len(packed) >= len(data):
        return Codec.RAW, 0, data
    return codec, shuffle, memoryview(packed)


def decode(codec: int, shuffle: int, payload: memoryview, into: memoryview) -> None:
    """Unpack a verified payload into exactly the block's bytes.

    Raises `BlockCorrupt` when it unpacks to something else, `CodecUnavailable` when its library is not here.
    """
    if codec == Codec.RAW:
        if len(payload) != len(into) or shuffle > 1:
            raise BlockCorrupt("a raw payload has another length than its block", cause="bad-length")
        into[:] = payload
        return
    if codec not in _LIBRARIES:
        raise BlockCorrupt(f"the value's codec {codec} is unknown", cause="bad-codec")
    library = _library(Codec(codec))
    try:
        if codec == Codec.LZ4:
            planes: bytes = library.decompress(payload, uncompressed_size=len(into))
        else:
            _check_zstd_size(library, payload, len(into))
            planes = library.ZstdDecompressor().decompress(payload, max_output_size=len(into))
    except (_errors_of(library), ValueError, OverflowError) as error:
        raise BlockCorrupt(f"the payload cannot be unpacked: {error}", cause="bad-payload") from error
    if len(planes) != len(into) or (shuffle > 1 and len(into) % shuffle):
        raise BlockCorrupt("the payload unpacks to another length than its block", cause="bad-length")
    if shuffle > 1:
        _unshuffle(planes, shuffle, into)
    else:
        into[:] = planes


def _shuffled(data: memoryview, itemsize: int) -> bytes:
    # Strided slices of bytes are one tight C loop each, far faster than strided memoryviews.
    flat = bytes(data)
    return b"".join([flat[plane::itemsize] for plane in range(itemsize)])


def _unshuffle(planes: bytes, itemsize: int, into: memoryview) -> None:
    num_items = len(planes) // itemsize
    flat = bytearray(len(planes))
    for plane in range(itemsize):
        flat[plane::itemsize] = planes[plane * num_items : (plane + 1) * num_items]
    into[:] = flat


def _library(codec: Codec) -> ModuleType:
    name = _LIBRARIES[codec]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise CodecUnavailable(
            f"codec {codec.name.lower()} needs the package {package}: pip install 'kvd-daemon[codecs]'"
        ) from error


def _errors_of(library: ModuleType) -> type[Exception]:
    error: type[Exception] = getattr(library, "LZ4BlockError", None) or library.ZstdError
    return error


def _check_zstd_size(library: ModuleType, payload: memoryview, raw_nbytes: int) -> None:
    # The frame names its own size, and the library allocates what it says: look before.
    declared = library.get_frame_parameters(payload).content_size
    if declared != raw_nbytes:
        raise BlockCorrupt(f"the payload declares {declared} bytes, not {raw_nbytes}", cause="bad-length")
