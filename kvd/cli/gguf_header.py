"""The key-values at the head of a GGUF file: just enough to know a model's shape, without reading its weights.

Format, version 2 and 3, little-endian: magic, u32 version, u64 tensors, u64 key-values; each a string (u64 length,
UTF-8 bytes), a u32 type, a value. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from kvd.errors import InvalidRequest

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_STRING_NBYTES = 1 << 20
MAX_ARRAY_LENGTH = 1 << 24
MAX_DEPTH = 4

Value = int | float | bool | str | list["Value"]


def read_gguf_header(path: Path) -> dict[str, Value]:
    """Key -> value; arrays of strings (vocabularies) are left out. Raises `InvalidRequest` for another kind of file."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except (struct.error, UnicodeDecodeError, ValueError, MemoryError) as error:
        raise InvalidRequest(f"{path} is no GGUF file that can be read: {error or 'it ends too early'}") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error


def _read(file: BinaryIO) -> dict[str, Value]:
    magic, version = struct.unpack("<4sI", file.read(8))
    if magic != b"GGUF" or version not in {2, 3}:
        raise ValueError(f"it begins with {magic!r}, version {version}")
    _, num_pairs = struct.unpack("<QQ", file.read(16))
    found = {}
    for _ in range(num_pairs):
        name = _string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        value = _value(file, kind, 0)
        if value is not None:
            found[name] = value
    return found


def _value(file: BinaryIO, kind: int, depth: int) -> Value | None:
    if kind in _SCALARS:
        scalar = "<" + _SCALARS[kind]
        value: Value = struct.unpack(scalar, file.read(struct.calcsize(scalar)))[0]
        return value
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY or depth == MAX_DEPTH:
        raise ValueError(f"a value of type {kind}")
    inner, length = struct.unpack("<IQ", file.read(12))
    if length > MAX_ARRAY_LENGTH:
        raise ValueError(f"an array of {length} values")
    if inner in _SCALARS:
        form = f"<{length}{_SCALARS[inner]}"
        return list(struct.unpack(form, file.read(struct.calcsize(form))))
    values = [_string(file, skip=True) if inner == _STRING else _value(file, inner, depth + 1) for _ in range(length)]
    return None if inner == _STRING else [value for value in values if value is not None]


def _string(file: BinaryIO, *, skip: bool = False) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_STRING_NBYTES:
        raise ValueError(f"a text of {length} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("it ends too early")
    return "" if skip else data.decode()
