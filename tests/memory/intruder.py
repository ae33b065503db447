"""Run by test_segment.py with a segment's read-only descriptor: becomes another user and tries to change the segment.

Prints {"attempt": …, "refused": bool}. An ordinary user cannot become another; the same refusals hold for its own uid,
since the mode is 0400.
"""

import ctypes
import json
import mmap
import os
import sys

NBYTES = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def check(result: int) -> int:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def readable_map(descriptor: int) -> int:
    address = libc.mmap(None, NBYTES, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise RuntimeError("a reader must be able to read")
    return address


def map_writable(descriptor: int) -> None:
    mmap.mmap(descriptor, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def make_map_writable(descriptor: int) -> None:
    check(libc.mprotect(readable_map(descriptor), NBYTES, mmap.PROT_READ | mmap.PROT_WRITE))


def reopen_writable(descriptor: int) -> None:
    os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)


def write(descriptor: int) -> None:
    os.pwrite(descriptor, b"yours", 0)


def truncate(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)


def grow(descriptor: int) -> None:
    check(libc.fallocate(descriptor, 0, 0, 2 * NBYTES))


def punch(descriptor: int) -> None:
    check(libc.fallocate(descriptor, 0x01 | 0x02, 0, NBYTES))


def stray_write(descriptor: int) -> None:
    ctypes.memset(readable_map(descriptor), 0, 1)


attempt = sys.argv[2]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    globals()[attempt](int(sys.argv[1]))
except OSError:
    refused = True
else:
    refused = False
print(json.dumps({"attempt": attempt, "refused": refused}))
