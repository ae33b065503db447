from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt
from kvd.tiers import value_format
from kvd.tiers.base import TierKey
from kvd.tiers.value_format import HEADER_NBYTES, decode_header, encode_header

KEY = TierKey(NamespaceDigest(b"\x11" * 32), ChainHash(b"\x22" * 32))


def value_of(payload: bytes) -> bytes:
    view = memoryview(payload)
    return encode_header(KEY, view, codec=0, shuffle=0, raw_nbytes=len(payload)) + payload


def check(value: bytes, raw_nbytes: int) -> None:
    decode_header(value[:HEADER_NBYTES], KEY, raw_nbytes=raw_nbytes).verify(memoryview(value)[HEADER_NBYTES:])


def test_the_worked_example_of_the_docstring_is_what_is_written():
    example = "".join(re.findall(r"^    ((?:[0-9a-f]{2} ?)+)$", value_format.__doc__, re.MULTILINE))
    assert bytes.fromhex(example) == value_of(bytes(range(4)))


@given(payload=st.binary(min_size=1, max_size=300), where=st.integers(min_value=0), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(payload: bytes, where: int, bit: int):
    value = bytearray(value_of(payload))
    check(bytes(value), len(payload))
    value[where % len(value)] ^= 1 << bit
    with pytest.raises(BlockCorrupt):
        check(bytes(value), len(payload))


@given(payload=st.binary(min_size=1, max_size=100), junk=st.binary(min_size=64, max_size=200))
def test_junk_is_never_a_value(payload: bytes, junk: bytes):
    with pytest.raises(BlockCorrupt):
        check(junk, len(payload))
