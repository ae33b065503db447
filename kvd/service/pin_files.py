"""Pins on disk: one small file each, so that they outlive the daemon. Written by a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from pathlib import Path

import msgspec

from kvd.block import HASH_NBYTES
from kvd.errors import RuntimeFolderError

SUFFIX = ".pin"
MAX_FILE_NBYTES = 64 << 20
_log = logging.getLogger(__name__)


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a pin is after a restart. No token ids and no salt: the digest and the chain hashes name them."""

    pin: str
    label: str
    uid: int
    tenant: str
    digest: bytes
    hashes: bytes
    model: str
    engine: str
    positional: str
    adapter: str
    has_salt: bool
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int


class PinFiles:
    """A folder of pins. `save` and `remove` return at once and never raise; `is_saved` says whether that failed."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, readable by the daemon's user alone. Raises `RuntimeFolderError`."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeFolderError(f"pins cannot be kept in {folder}: {error}") from error
        self._folder = folder
        self._failed: set[str] = set()
        """Guarded by the GIL: single operations on a set."""
        self._work: queue.SimpleQueue[tuple[str, PinRecord | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvd-pins", daemon=True)
        self._thread.start()

    def load(self) -> list[PinRecord]:
        """What is there, by name. A file that cannot be read is passed over with a line in the log. Blocks."""
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                record = _read(path)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("the pin %s cannot be read and is left alone: %s", path, error)
                continue
            found.append(record)
        return found

    def save(self, record: PinRecord) -> None:
        """Has it written."""
        self._work.put((record.pin, record))

    def remove(self, pin: str) -> None:
        """Has it removed."""
        self._work.put((pin, None))

    def is_saved(self, pin: str) -> bool:
        """Whether one of those that were loaded or saved is on disk, or about to be."""
        return pin not in self._failed

    def close(self) -> None:
        """What was asked for is on disk. Idempotent."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            pin, record = task
            try:
                self._carry_out(pin, record)
            except OSError as error:
                self._failed.add(pin)
                _log.warning("the pin %s is not kept on disk: %s", pin, error)

    def _carry_out(self, pin: str, record: PinRecord | None) -> None:
        path = self._folder / f"{pin}{SUFFIX}"
        if record is None:
            self._failed.discard(pin)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        draft = path.with_suffix(".new")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._failed.discard(pin)


def _read(path: Path) -> PinRecord:
    if path.stat().st_size > MAX_FILE_NBYTES:
        raise ValueError("it is too large")
    record = msgspec.json.decode(path.read_bytes(), type=PinRecord)
    if path.stem != record.pin or len(record.digest) != HASH_NBYTES or len(record.hashes) % HASH_NBYTES:
        raise ValueError("its parts do not fit each other")
    return record
