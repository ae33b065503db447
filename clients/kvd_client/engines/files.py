"""Digests of weight files, remembered by size and time. No engine is imported here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec


class _Record(msgspec.Struct, frozen=True):
    """What is remembered of one weight file; valid as long as size and time are those of the file."""

    nbytes: int
    mtime_ns: int
    sha256: str


def file_digest(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes; remembered beside it, or in the user's cache where that is read-only."""
    stat = path.stat()
    for place in _record_places(path):
        record = _read_record(place)
        if record is not None and (record.nbytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return record.sha256
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        _remember(path, _Record(stat.st_size, stat.st_mtime_ns, sha256))
    return sha256


def _record_places(path: Path) -> Iterator[Path]:
    yield path.with_name(f".{path.name}.kvd-sha256")
    try:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return  # neither HOME nor an entry of this user in the system's list
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    yield Path(cache_home) / "kvd" / "weights" / f"{name}.json"


def _read_record(place: Path) -> _Record | None:
    try:
        return msgspec.json.decode(place.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


def _remember(path: Path, record: _Record) -> None:
    """Writes the record to the first place that takes it. Never raises: without a record the file is read again."""
    for number, place in enumerate(_record_places(path)):
        with contextlib.suppress(OSError):
            if number:
                place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, msgspec.json.encode(record))
            return


def _replace(place: Path, content: bytes) -> None:
    """Readers see the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=place.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(place)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
