"""The llama-server process behind the proxy: found, started, and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvd.errors import EngineUnsupported, InvalidRequest

STOP_BOUND_S = 10.0
_PREFIX = "kvd-llama-"
_MAX_FOLDER_NBYTES = 107 - len("/kvd-llama-01234567/server.sock")
"""A unix socket's path holds 107 bytes and a NUL (unix(7))."""
_SHIM = "kvd_client.engines.llama_cpp.xllamacpp_server"
_EXEC = (
    # The server must not outlive a proxy that is killed.
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def find_server(binary: str | None) -> list[str]:
    """The command that runs a llama-server: the given program, that on PATH, else the one in the xllamacpp wheel.

    Raises `InvalidRequest` for a program that is not there, `EngineUnsupported` when there is none at all.
    """
    found = shutil.which(binary or "llama-server")
    if found is not None:
        return [found]
    if binary is not None:
        raise InvalidRequest(f"there is no program {binary}")
    if importlib.util.find_spec("xllamacpp") is None:
        raise EngineUnsupported("no llama-server: install llama.cpp, name it with --bin, or pip install xllamacpp")
    return [sys.executable, "-m", _SHIM]


@contextlib.contextmanager
def private_folder(parent: str | None = None) -> Iterator[Path]:
    """A folder in memory for the server's socket and its slots' files, removed at the end.

    Those of proxies that were killed are removed too: a folder is in use while somebody holds its lock.
    Raises `InvalidRequest` for a parent that cannot be written or in which a socket's path is too long.
    """
    where = Path(parent) if parent else Path("/dev/shm")  # noqa: S108
    if not os.access(where, os.W_OK | os.X_OK):
        if parent:
            raise InvalidRequest(f"{parent} is no folder that can be written")
        where = Path(tempfile.gettempdir())
    if len(os.fsencode(where)) > _MAX_FOLDER_NBYTES:
        raise InvalidRequest(f"{where} is too long for a socket in it: at most {_MAX_FOLDER_NBYTES} bytes")
    for old in where.glob(f"{_PREFIX}*"):
        _remove_if_unused(old)
    folder, lock = _make_locked(where)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _make_locked(where: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)
        # Another proxy that started now took it for one that nobody uses, before it was locked.


def _remove_if_unused(folder: Path) -> None:
    try:
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # its proxy lives
    finally:
        os.close(lock)


class Child:
    """One server process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], arguments: Sequence[str], socket_path: Path, slot_save_path: str
    ) -> Child:
        """Starts it on a socket of its own; it is not ready yet."""
        own = ["--host", str(socket_path), "--slot-save-path", slot_save_path]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _EXEC, *command, *arguments, *own, stdin=asyncio.subprocess.DEVNULL
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL when that is not enough."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_BOUND_S)
        return await self._process.wait()
