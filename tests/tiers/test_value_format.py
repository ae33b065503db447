from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt
from kvd.tiers import value_format
from kvd.tiers.base import Generation, TierKey
from kvd.tiers.names import MAX_TEXT_NBYTES, name_of
from kvd.tiers.redis_generations import record_of
from kvd.tiers.redis_records import MAX_RECORDS
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


def test_the_examples_of_the_protocol_page_are_what_is_written():
    page = (Path(__file__).parents[2] / "PROTOCOL.md").read_text()

    def example(mark: str) -> str:
        return page.partition(f"<!-- {mark} -->\n```\n")[2].partition("\n```\n<!-- end -->")[0]

    assert bytes.fromhex(example("value example")) == value_of(bytes(range(4)))
    name = name_of(KEY.namespace, tenant="gid:1000", model="demo", engine="raw/1")
    record = record_of(Generation(0x0123456789ABCDEF), flushed=True, name=name)
    assert example("record example") == record.decode()
    assert f"more than {MAX_TEXT_NBYTES} bytes" in page
    assert f"more than {MAX_RECORDS}." in page


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
