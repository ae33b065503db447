"""Token ids of every kind give the same bytes, and what is no token id is refused."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvd.block import NamespaceDigest
from kvd.errors import InvalidTokens
from kvd.hashing import chain_hashes, encode_tokens

IDS = [0, 1, 255, 256, 65_535, 65_536, 70_000, 2**31 - 1]


class Special(enum.IntEnum):
    EOS = 2


# case A2
@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        iter(IDS),
        [np.int64(value) for value in IDS],
        [np.uint32(value) for value in IDS],
        np.array(IDS, dtype=np.int64),
        np.array(IDS, dtype=np.uint32),
        np.array(IDS, dtype=np.int32),
        np.array(IDS * 2, dtype=np.int64)[: len(IDS)],
        np.repeat(np.array(IDS, dtype=np.int64), 2)[::2],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        torch.tensor([IDS]),
        [torch.tensor(value) for value in IDS],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_the_kind_of_integer_does_not_matter(ids):
    assert encode_tokens(ids) == b"".join(value.to_bytes(4, "little") for value in IDS)


def test_the_greatest_id():
    assert encode_tokens([2**32 - 1]) == b"\xff" * 4
    assert encode_tokens(np.array([2**32 - 1], dtype=np.uint32)) == b"\xff" * 4


def test_an_enum_of_ints_is_an_int():
    assert encode_tokens([Special.EOS]) == b"\2\0\0\0"


# case A2
@pytest.mark.parametrize(
    "ids",
    [
        [-1],
        [2**32],
        [2**64],
        [1.0],
        [True],
        [5, False],
        [0, 1, 2, True],
        ["1"],
        [None],
        [np.float32(1)],
        [np.True_],
        "12",
        b"\1\2",
        bytearray(4),
        pytest.param(memoryview(b"1234"), id="memoryview"),
        np.array([1.0]),
        np.array([True]),
        np.array([-1]),
        np.array([2**32]),
        np.array([[1, 2], [3, 4]]),
        np.array(5),
        np.array([1, 2], dtype="timedelta64[s]"),
        {1, 2},
        frozenset({1}),
        {1: 2},
        {1: 2}.keys(),
        5,
        None,
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([-1]),
        torch.zeros((2, 2), dtype=torch.int64),
    ],
    ids=repr,
)
def test_what_is_no_token_id_is_refused(ids):
    with pytest.raises(InvalidTokens):
        encode_tokens(ids)
    assert issubclass(InvalidTokens, ValueError)


# case A2
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.array([[1, 2], [3, 4]]), r"one dimension .* not shape \[2, 2\]"),
        (np.array(5), r"one dimension .* not shape \[\]"),
        (np.array([1.0]), "not float64"),
        (torch.tensor([True]), "not torch.bool"),
        ({1, 2}, "a set has no order"),
        ("12", "not str"),
        ([-1], "negative or above"),
    ],
    ids=repr,
)
def test_a_refusal_says_what_is_wrong(ids, says):
    with pytest.raises(InvalidTokens, match=says):
        encode_tokens(ids)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=64))
def test_encoding_is_the_definition(ids):
    assert encode_tokens(ids) == b"".join(value.to_bytes(4, "little") for value in ids)


@given(st.lists(st.integers(0, 2**32 - 1) | st.booleans(), min_size=1, max_size=40))
def test_no_bool_slips_through(ids):
    if any(isinstance(value, bool) for value in ids):
        with pytest.raises(InvalidTokens):
            encode_tokens(ids)
    else:
        encode_tokens(ids)


# case A7
@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_only_full_blocks_have_a_hash(num_tokens, num_hashes):
    root = NamespaceDigest(bytes(32))
    assert len(chain_hashes(root, encode_tokens(range(num_tokens)), 16)) == num_hashes
