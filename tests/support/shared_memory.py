"""A /dev/shm of a process's own: whatever is in it the process has put there, however many others use the machine's.

process = subprocess.Popen([*OWN_SHARED_MEMORY, sys.executable, ...])
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

_NAMESPACES = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]


def own_shared_memory(options: str = "mode=1777") -> list[str]:
    """The words before a command that give it one, empty, mounted with these options; its pid stays what it was."""
    return ["unshare", *_NAMESPACES, "sh", "-c", f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"', "sh"]


OWN_SHARED_MEMORY = own_shared_memory()


class SharedMemoryOf:
    """What lies in the /dev/shm of a living process; it can be looked at after the process's end, too."""

    def __init__(self, pid: int) -> None:
        self._folder = os.open(f"/proc/{pid}/root/dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self) -> list[str]:
        return os.listdir(self._folder)  # noqa: PTH208 - of a folder that may have no path any more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._folder)
