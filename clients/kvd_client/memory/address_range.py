"""One contiguous range of addresses in which scattered blocks lie side by side.

The range is reserved once for all that a sequence may ever hold, so what grows never moves. A part of it is in one of
three states: reserved (any access faults), mapped read-only, mapped writable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from kvd.errors import ClientClosed, KvdError
from kvd_client.memory import libc

HUGE_PAGE_NBYTES = 2 << 20
_FAULT_AROUND_NBYTES = 64 << 10
_RESERVED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE


class AddressRange:
    """`nbytes` of address space; no thread is excluded, the owner sees to that. Unmapped by `close`, which is
    idempotent, or with the object when no view over it was ever made.

    Nothing in here is inherited by a forked child, nor written to a core dump.
    """

    __slots__ = ("_base", "_bytes", "_pid", "address", "is_viewed", "nbytes")

    def __init__(self, nbytes: int, phase: int = 0) -> None:
        """`phase` is what the address leaves modulo 2 MiB.

        Where a place in the range and what is mapped there have the same remainder, the kernel enters a huge page as
        one: a segment's memory is in huge pages wherever the daemon could have them.
        """
        self.nbytes = nbytes
        self.address = 0
        self.is_viewed = False
        """Whether anybody was given a view over it."""
        self._pid = os.getpid()
        self._base = libc.mmap(0, nbytes + HUGE_PAGE_NBYTES, libc.PROT_NONE, _RESERVED)
        self.address = self._base + (phase - self._base) % HUGE_PAGE_NBYTES
        libc.keep_to_process(self._base, nbytes + HUGE_PAGE_NBYTES)
        self._bytes: memoryview | None = None

    def map_file(self, offset: int, nbytes: int, fd: int, fd_offset: int, *, writable: bool) -> None:
        """Maps a piece of a descriptor at `offset`, in the place of what was there. Raises `OutOfMemory`.

        Raises `ClientClosed` once the range is closed, as another thread may do that while a reply is under way.
        """
        if not self.address:
            raise ClientClosed("the sequence was closed")
        protection = libc.PROT_READ | libc.PROT_WRITE if writable else libc.PROT_READ
        flags = libc.MAP_SHARED | libc.MAP_FIXED
        libc.mmap(self.address + offset, nbytes, protection, flags, fd, fd_offset)
        try:
            libc.keep_to_process(self.address + offset, nbytes)
        except KvdError:
            self.forget(offset, nbytes)
            raise

    def make_resident(self, offset: int, nbytes: int) -> None:
        """Fills the page table for one mapping of pages that are in memory, by reading a byte of each 64 KiB.

        The kernel maps a huge page whole, and of others what lies around a fault (its fault_around_bytes, 64 KiB unless
        tuned, aligned windows within the mapping): 2.0 ms for 45 MiB where MAP_POPULATE, which looks at every page,
        takes 3.5. Tuned down, the remaining pages are mapped at their first touch. A writable mapping of shared memory
        is writable after a read as after a write.
        """
        if self._bytes is None:
            self._bytes = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")
        span = self._bytes[offset : offset + nbytes]
        bytes(span[::_FAULT_AROUND_NBYTES])
        bytes(span[-1:])

    def map_private(self, offset: int, nbytes: int) -> None:
        """Maps zeroed memory of this process at `offset`."""
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED | libc.MAP_NORESERVE
        libc.mmap(self.address + offset, nbytes, libc.PROT_READ | libc.PROT_WRITE, flags)
        libc.keep_to_process(self.address + offset, nbytes)

    def protect(self, offset: int, nbytes: int, *, writable: bool) -> None:
        """Makes a mapped part read-only or writable in place; every view over it stays valid."""
        protection = libc.PROT_READ | libc.PROT_WRITE if writable else libc.PROT_READ
        libc.mprotect(self.address + offset, nbytes, protection)

    def forget(self, offset: int, nbytes: int) -> None:
        """Back to reserved: any access faults. Raises `OutOfMemory`."""
        libc.mmap(self.address + offset, nbytes, libc.PROT_NONE, _RESERVED | libc.MAP_FIXED)
        libc.keep_to_process(self.address + offset, nbytes)

    def close(self) -> None:
        """Unmaps everything. The caller has made sure that no view over it is left."""
        if self.address:
            address, self.address = self.address, 0
            try:
                libc.munmap(self._base, self.nbytes + HUGE_PAGE_NBYTES)
            except KvdError:
                self.address = address
                raise

    def __del__(self) -> None:
        # Dropped half made, by an error or a signal. Where a view was made it may outlive this object; and in a forked
        # child the addresses may be somebody else's.
        if getattr(self, "address", 0) and not self.is_viewed and self._pid == os.getpid():
            with contextlib.suppress(KvdError):
                self.close()
