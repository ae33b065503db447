"""mmap and its relatives as the kernel has them: at a chosen address, and with errors as exceptions.

The standard library's `mmap` can neither map at an address nor change protection, and this is all that the client
needs. Each call releases the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os

from kvd.errors import KvdError, OutOfMemory, StateError

PROT_NONE = 0
PROT_READ = 1
PROT_WRITE = 2
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MADV_DONTFORK = 10
MADV_DONTDUMP = 16

_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mprotect = _libc.mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mmap(address: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """The address of the new mapping. Raises `OutOfMemory` (no mapping or memory left), `StateError` otherwise."""
    found: int | None = _mmap(address or None, nbytes, protection, flags, fd, offset)
    if found is None or found == _MAP_FAILED:
        raise _failure("mmap", nbytes)
    return found


def munmap(address: int, nbytes: int) -> None:
    """Raises `OutOfMemory` when a hole would split a mapping beyond vm.max_map_count, `StateError` otherwise."""
    if _munmap(address, nbytes):
        raise _failure("munmap", nbytes)


def mprotect(address: int, nbytes: int, protection: int) -> None:
    """Raises `OutOfMemory` when a split would exceed vm.max_map_count, `StateError` otherwise."""
    if _mprotect(address, nbytes, protection):
        raise _failure("mprotect", nbytes)


def keep_to_process(address: int, nbytes: int) -> None:
    """A forked child has a hole here, and a core dump leaves it out. Set again after every mmap over the place."""
    for advice in (MADV_DONTFORK, MADV_DONTDUMP):
        if _madvise(address, nbytes, advice):
            raise _failure("madvise", nbytes)


def _failure(call: str, nbytes: int) -> KvdError:
    number = ctypes.get_errno()
    if number in (errno.ENOMEM, errno.EAGAIN):
        return OutOfMemory(f"{call} of {nbytes} bytes: no more memory or mappings (vm.max_map_count)")
    return StateError(f"{call} of {nbytes} bytes: {os.strerror(number)}")
