"""Flushes that must outlive a crash of the embedded server: one small file beside its snapshot.

A server that restarts from a snapshot taken before a flush would bring the flushed blocks back. So each flush is
written here, synced, before the server is told, and told again whenever another run of the server is met.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Literal

from kvd.block import HASH_NBYTES, NamespaceDigest
from kvd.errors import RuntimeFolderError, TierUnavailable
from kvd.tiers.base import Generation


class GenerationJournal:
    """Namespace -> the generation of its last flush. Lines of two hex numbers; a torn last line is ignored."""

    def __init__(self, path: Path) -> None:
        """Reads what is there and rewrites it without the outdated lines. Raises `RuntimeFolderError`."""
        self._path = path
        self.flushed: dict[NamespaceDigest, Generation] = {}
        self._lock = threading.Lock()
        self._may_be_torn = False
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else []
            for line in lines:
                self._take(line)
            draft = path.with_suffix(".new")
            _append(draft, "".join(map(_line, self.flushed.items())), mode="w")
            draft.replace(path)
        except OSError as error:
            raise RuntimeFolderError(f"the flush journal {path} cannot be kept: {error}") from error

    def record(self, namespace: NamespaceDigest, generation: Generation) -> None:
        """On disk when this returns; what is there already costs nothing. Thread-safe.

        Raises `TierUnavailable` (a full disk, for instance); then the flush must not be called done.
        """
        with self._lock:
            if self.flushed.get(namespace) == generation:
                return
            # A line that a full disk cut short must not swallow the next one.
            line = "\n" * self._may_be_torn + _line((namespace, generation))
            try:
                self._may_be_torn = True
                _append(self._path, line, mode="a")
            except OSError as error:
                raise TierUnavailable(
                    f"the flush journal {self._path} cannot be written: {error}", cause="journal"
                ) from error
            self._may_be_torn = False
            self.flushed[namespace] = generation

    def _take(self, line: str) -> None:
        namespace, _, number = line.partition(" ")
        try:
            digest, generation = bytes.fromhex(namespace), int(number, 16)
        except ValueError:
            return
        if len(digest) == HASH_NBYTES and len(number) == 16:
            self.flushed[NamespaceDigest(digest)] = Generation(generation)


def _append(path: Path, text: str, *, mode: Literal["a", "w"]) -> None:
    with path.open(mode, encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _line(entry: tuple[NamespaceDigest, Generation]) -> str:
    return f"{entry[0].hex()} {entry[1]:016x}\n"
