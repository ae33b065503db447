"""The runtime folder: made with the right owner and mode, and locked against a second daemon."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvd.errors import AlreadyRunning, ConfigError, RuntimeFolderError
from kvd.server.endpoints import SocketAccess

LOCK_FILE = "kvd.lock"
_MAX_ATTEMPTS = 10


def access_of_group(name: str) -> SocketAccess:
    """Both sockets' mode and group: 0660 for a named group, 0600 (the daemon's user, and root) without one.

    Raises `ConfigError` when no such group exists.
    """
    if not name:
        return SocketAccess()
    try:
        return SocketAccess(mode=0o660, gid=grp.getgrnam(name).gr_gid)
    except KeyError as error:
        raise ConfigError(f"access.group names {name!r}, and there is no such group; make it with groupadd") from error


def prepare_folder(folder: Path, access: SocketAccess) -> None:
    """Makes the folder (0750 and the sockets' group; 0700 without one) if it is not there, else checks it.

    Raises `RuntimeFolderError` for a folder that cannot be made or written, belongs to another user, or that others
    may write to (they could put sockets of their own in our place).
    """
    mode = 0o700 if access.gid is None else 0o750
    try:
        # A folder that is there keeps the mode its owner gave it: systemd and tmpfiles make it before us.
        is_ours = not folder.exists()
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        if is_ours:
            if access.gid is not None and folder.stat().st_gid != access.gid:
                os.chown(folder, -1, access.gid)
            folder.chmod(mode)
        found = folder.stat()
    except OSError as error:
        raise _folder_error(folder, error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeFolderError(f"{folder} is not a folder")
    if found.st_uid not in {0, os.geteuid()}:
        raise RuntimeFolderError(
            f"{folder} belongs to uid {found.st_uid}, who could replace the sockets in it; choose another folder"
        )
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        raise RuntimeFolderError(f"everybody may write to {folder}: chmod o-w it, or choose another runtime folder")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise RuntimeFolderError(f"this user may not write to {folder}; choose another runtime folder, or its owner")


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; whoever holds it may remove what a dead daemon left there.

    The kernel drops the lock with the process, however that ends. Raises `AlreadyRunning`, `RuntimeFolderError`.
    """
    path = folder / LOCK_FILE
    descriptor = _lock(path)
    try:
        yield
    finally:
        # Removed while still locked: who opened it meanwhile gets the lock of a file that is gone, and looks again.
        # If ours is gone already, what lies there is the lock of another daemon.
        with contextlib.suppress(OSError):
            if _is_same_file(descriptor, path):
                path.unlink()
        os.close(descriptor)


def _lock(path: Path) -> int:
    for _ in range(_MAX_ATTEMPTS):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            raise _folder_error(path.parent, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                _write_pid(descriptor, path)
                return descriptor
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise AlreadyRunning(
                f"another daemon (pid {holder or 'unknown'}) serves {path.parent}; stop it, or choose another runtime "
                f"folder"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise RuntimeFolderError(f"{path} keeps being replaced; is something else removing it?")


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write_pid(descriptor: int, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise _folder_error(path.parent, error) from error


def _folder_error(folder: Path, error: OSError) -> RuntimeFolderError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return RuntimeFolderError(f"the disk of {folder} is full; free some space, or choose another runtime folder")
    return RuntimeFolderError(
        f"cannot make or write the runtime folder {folder}: {error.strerror}; choose another, or its owner"
    )
