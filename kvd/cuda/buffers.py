"""Where the bytes of a Python buffer lie."""

from __future__ import annotations

import ctypes
import mmap


def address_of(buffer: memoryview | bytearray | mmap.mmap) -> int:
    """The address of a writable, contiguous buffer. Whoever uses it keeps the buffer alive and its size as it is."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
