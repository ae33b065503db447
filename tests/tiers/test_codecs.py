from __future__ import annotations

import contextlib
import random
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BlockCorrupt, CodecUnavailable, ConfigError
from kvd.tiers import codecs
from kvd.tiers.codecs import Codec, codec_named, decode, encode

PACKING = [Codec.LZ4, Codec.ZSTD]

blocks = st.one_of(
    st.binary(min_size=1, max_size=5000),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=40), st.integers(1, 300)),
)


def unpacked(codec: int, shuffle: int, payload: memoryview, nbytes: int) -> bytes:
    into = memoryview(bytearray(nbytes))
    decode(codec, shuffle, payload, into)
    return bytes(into)


@given(data=blocks, codec=st.sampled_from(Codec), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_what_is_packed_unpacks_to_the_same(data: bytes, codec: Codec, itemsize: int):
    used, shuffle, payload = encode(codec, memoryview(data), itemsize)
    assert len(payload) <= len(data)
    assert unpacked(used, shuffle, payload, len(data)) == data


@given(data=blocks, codec=st.sampled_from(PACKING), payload=st.binary(max_size=200), shuffle=st.integers(0, 255))
def test_any_payload_unpacks_to_the_right_length_or_is_corrupt(data, codec, payload, shuffle):
    with contextlib.suppress(BlockCorrupt):
        assert len(unpacked(codec, shuffle, memoryview(payload), len(data))) == len(data)


@pytest.mark.parametrize("codec", PACKING)
def test_shuffling_makes_floats_of_one_scale_pack_better(codec: Codec):
    rng = random.Random(1)
    data = struct.pack("<8192e", *[rng.gauss(1.5, 0.02) for _ in range(8192)])
    packed = {itemsize: len(encode(codec, memoryview(data), itemsize)[2]) for itemsize in (1, 2)}
    assert packed[2] < 0.95 * packed[1]


@pytest.mark.parametrize("codec", Codec)
def test_what_cannot_be_packed_is_stored_raw_without_a_copy(codec: Codec):
    data = memoryview(struct.pack("<512Q", *[hash((i, 1)) & (2**64 - 1) for i in range(512)]))
    used, shuffle, payload = encode(codec, data, 2)
    assert (used, shuffle) == (Codec.RAW, 0)
    assert payload is data


@pytest.mark.parametrize("codec", PACKING)
def test_a_truncated_payload_is_corrupt(codec: Codec):
    data = bytes(10000)
    _, shuffle, payload = encode(codec, memoryview(data), 2)
    with pytest.raises(BlockCorrupt):
        unpacked(codec, shuffle, payload[:-1], len(data))
    with pytest.raises(BlockCorrupt):
        unpacked(codec, shuffle, payload, len(data) - 2)
    with pytest.raises(BlockCorrupt):
        unpacked(codec, shuffle, payload, len(data) + 2)


def test_an_unknown_codec_is_corrupt():
    with pytest.raises(BlockCorrupt) as caught:
        unpacked(77, 0, memoryview(b"x"), 4)
    assert caught.value.cause == "bad-codec"


@pytest.mark.parametrize("codec", PACKING)
def test_a_library_that_is_not_installed_is_said(codec: Codec, monkeypatch: pytest.MonkeyPatch):
    data = bytes(4096)
    _, shuffle, payload = encode(codec, memoryview(data), 2)
    for module in ("lz4.block", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CodecUnavailable, match="pip install"):
        unpacked(codec, shuffle, payload, len(data))
    with pytest.raises(ConfigError, match="pip install"):
        codec_named(codec.name.lower())


def test_names_of_codecs():
    assert [codec_named(name) for name in ("raw", "lz4", "zstd")] == list(codecs.Codec)
    with pytest.raises(ConfigError, match="raw, lz4, zstd"):
        codec_named("gzip")
