"""Whoever maps a segment finds its memory real: no page is made, or zeroed, at a first touch."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from kvd.memory import HostSegment

MIB = 1 << 20
PAGE_NBYTES = 4096
MODES = {"collapse": True, "plain": False}


def num_pages_in_memory(mapping: mmap.mmap) -> int:
    """mincore(2): a page that is merely set aside does not count."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    anchor = ctypes.c_char.from_buffer(mapping)
    answers = (ctypes.c_ubyte * (len(mapping) // PAGE_NBYTES))()
    assert not libc.mincore(ctypes.addressof(anchor), len(mapping), answers)
    del anchor
    return sum(answer & 1 for answer in answers)


@pytest.mark.parametrize("collapse", MODES.values(), ids=MODES)
@pytest.mark.parametrize("nbytes", [PAGE_NBYTES, MIB, 2 * MIB, 3 * MIB + PAGE_NBYTES, 35 * MIB])
def test_every_page_is_in_memory_and_zero(nbytes: int, collapse: bool) -> None:
    with (
        HostSegment(nbytes, collapse=collapse) as segment,
        mmap.mmap(segment.writable_fd, nbytes) as mapping,
    ):
        assert num_pages_in_memory(mapping) == nbytes // PAGE_NBYTES
        assert mapping[:] == bytes(nbytes)


def test_no_address_space_stays_behind() -> None:
    def num_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("kvd-segment")

    before = num_mappings()
    with HostSegment(4 * MIB):
        assert num_mappings() == before
