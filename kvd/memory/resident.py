"""Makes memory of a memfd real before anybody maps it, in transparent huge pages where the kernel has them.

`posix_fallocate` only sets memory aside: each page is still found and zeroed at its first touch, by whoever touches it,
at ten times the price of writing it. And a table of 4 KiB pages has 32,768 entries for 128 MiB, to be filled by every
process that maps them and changed by every one that seals them. MADV_COLLAPSE (Linux 6.1) gives a memfd huge pages
whatever /sys/kernel/mm/transparent_hugepage/shmem_enabled says ("deny" excepted), and needs no pages set aside as
hugetlbfs does. Processes that map them at addresses that suit get one entry for 2 MiB; others map parts as ever.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from types import TracebackType
from typing import Self

from kvd.memory.available import HUGE_PAGE_NBYTES

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_PROT_NONE, _MAP_NORESERVE, _MAP_FIXED = 0, 0x4000, 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Window:
    """Addresses at which one piece of a memfd after another is mapped to be made real. A context manager.

    Releases the GIL in every call that takes long. Raises `OSError`.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes` is the longest piece."""
        self._nbytes = nbytes + HUGE_PAGE_NBYTES
        self._base = _mmap(0, self._nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self._aligned = -(-self._base // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES

    def make_real(self, fd: int, offset: int, nbytes: int, *, huge_pages: bool) -> None:
        """Every page of this piece has memory, and zeros in it where nothing was written.

        `offset` is a multiple of 2 MiB. Huge pages are had as far as free memory is not in crumbs; the rest is plain
        pages. The memory is there in either case: `OSError` otherwise.
        """
        whole_nbytes = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES if huge_pages else 0
        for place in range(offset, offset + whole_nbytes, HUGE_PAGE_NBYTES):
            # What is to be collapsed must exist in part; pages that do not are zeroed in the huge page, once.
            os.pwrite(fd, b"\0", place)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _mmap(self._aligned, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        collapsed = bool(whole_nbytes) and not _libc.madvise(self._aligned, whole_nbytes, _MADV_COLLAPSE)
        os.posix_fallocate(fd, offset, nbytes)
        if not collapsed or whole_nbytes < nbytes:
            # A kernel older than 5.14 refuses: then pages are zeroed at their first touch after all.
            _libc.madvise(self._aligned, nbytes, _MADV_POPULATE_WRITE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _libc.munmap(self._base, self._nbytes)


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    found: int | None = _libc.mmap(address or None, nbytes, protection, flags, fd, offset)
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
