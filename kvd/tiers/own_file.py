"""A file of ours in a folder that another daemon may take over: removed only while it is still the one we made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class OwnFile:
    """Holds the file open without rights on it, so that no other file can have its inode number. `remove` ends it."""

    def __init__(self, path: Path) -> None:
        """`path` is there, and ours. Raises `OSError`."""
        self._path = path
        self._descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    @classmethod
    def create(cls, path: Path) -> OwnFile:
        """An empty one for our user alone. Raises `OSError`: `FileExistsError` for one that is there."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return cls(path)

    def is_there(self) -> bool:
        """Whether what lies there is still ours."""
        try:
            return self._descriptor >= 0 and os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except OSError:
            return False

    def remove(self) -> None:
        """Idempotent; never raises."""
        if self.is_there():
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
