"""One segment of host memory: a sealed memfd that processes map, resident before anybody sees it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvd.block import PAGE_NBYTES
from kvd.errors import InvalidLayout, OutOfMemory
from kvd.memory.available import HUGE_PAGE_NBYTES
from kvd.memory.resident import Window

ALLOCATION_STEP_NBYTES = 16 << 20
"""Memory is taken in steps of this, so that a close or a shortage is noticed within some 20 ms."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class HostSegment:
    """`nbytes` of shared memory with two descriptors: `writable_fd`, and `read_only_fd` for those who only read.

    Every page is there and zeroed when the constructor returns, so touching the memory never raises SIGBUS, and costs
    no more than an entry of the page table. The size is sealed, and the mode is 0400: whoever holds only `read_only_fd`
    can neither map it writable, nor make such a mapping writable, nor re-open it writable as another user, nor resize
    or punch it; the kernel refuses.

    A context manager; `close()` is idempotent and gives the memory back even while others still hold descriptors.
    Made on any thread, used by one at a time.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: bool = False,
        collapse: bool = True,
        before_step: Callable[[int], None] | None = None,
    ) -> None:
        """`before_step(remaining_nbytes)` is called before each allocation step and may raise to give up.

        `huge_pages` takes them from those the machine has set aside (hugetlbfs); `collapse` has the kernel make
        transparent ones as far as it can.

        Raises `InvalidLayout` for a size that is not whole pages, `OutOfMemory` when the memory cannot be had; what
        was allocated by then has been given back.
        """
        page_nbytes = HUGE_PAGE_NBYTES if huge_pages else PAGE_NBYTES
        if nbytes <= 0 or nbytes % page_nbytes:
            raise InvalidLayout(f"a segment of {nbytes} bytes is not a whole number of {page_nbytes}-byte pages")
        self.nbytes = nbytes
        self.huge_pages = huge_pages
        self.writable_fd = self.read_only_fd = -1
        self._mapping: mmap.mmap | None = None
        self.before_unmap: Callable[[], None] | None = None
        """Called once before the daemon's own mapping goes."""
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            if huge_pages:
                flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
            self.writable_fd = os.memfd_create("kvd-segment", flags)
            os.fchmod(self.writable_fd, 0o400)
            self.read_only_fd = os.open(f"/proc/self/fd/{self.writable_fd}", os.O_RDONLY | os.O_CLOEXEC)
            with Window(min(ALLOCATION_STEP_NBYTES, nbytes)) as window:
                for offset in range(0, nbytes, ALLOCATION_STEP_NBYTES):
                    if before_step is not None:
                        before_step(nbytes - offset)
                    step_nbytes = min(ALLOCATION_STEP_NBYTES, nbytes - offset)
                    window.make_real(self.writable_fd, offset, step_nbytes, huge_pages=collapse and not huge_pages)
            fcntl.fcntl(self.writable_fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            self.close()
            raise OutOfMemory(_reason(nbytes, error)) from error
        except BaseException:
            self.close()
            raise

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The daemon's own view of a part, writable, for copies. The segment is mapped at the first call.

        Release it before the segment closes; the mapping stays as long as any view of it.
        """
        if self._mapping is None:
            self._mapping = mmap.mmap(self.writable_fd, self.nbytes)
            self._mapping.madvise(mmap.MADV_DONTDUMP)
        return memoryview(self._mapping)[offset : offset + nbytes]

    def close(self) -> None:
        """Gives the memory back to the machine and closes both descriptors. Nobody maps it any more. Never raises."""
        self._unmap()
        if self.writable_fd >= 0:
            # A process that ignores its revoke still holds a descriptor; the punched memory is free all the same.
            # It cannot fail on a memfd of ours, and if it did the close would still free it with the last holder.
            _libc.fallocate(self.writable_fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, 0, self.nbytes)
        self.let_go()

    def let_go(self) -> None:
        """Closes both descriptors; who still maps the memory keeps its bytes, and the last of them frees it.

        Idempotent; never raises.
        """
        self._unmap()
        writable_fd, self.writable_fd = self.writable_fd, -1
        read_only_fd, self.read_only_fd = self.read_only_fd, -1
        for descriptor in (writable_fd, read_only_fd):
            if descriptor >= 0:
                os.close(descriptor)

    def _unmap(self) -> None:
        before_unmap, self.before_unmap = self.before_unmap, None
        if before_unmap is not None:
            before_unmap()
        self._mapping = None

    @property
    def closed(self) -> bool:
        """Whether `close()` or `let_go()` was called."""
        return self.writable_fd < 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reason(nbytes: int, error: OSError) -> str:
    what = f"a segment of {nbytes >> 20} MiB"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return f"no file descriptor is left for {what}; raise the limit of open files (LimitNOFILE)"
    if error.errno == errno.EFBIG:
        return f"{what} is over this process's file size limit (ulimit -f)"
    return f"{what} cannot be had: {os.strerror(error.errno or 0)}; free memory, or lower memory.budget"
