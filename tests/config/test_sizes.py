"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.config.sizes import format_size, parse_size
from kvd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("65536", 65536),
        ("4GiB", 4 << 30),
        (" 4 gib ", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("2M", 2 << 20),
        ("1GB", 10**9),
        ("0.5KiB", 512),
    ],
)
def test_sizes_that_are_right(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "4 GiBs", "-1", "1e9", "4,5GiB", "0.3B", "nan", "٤GiB", "1 2", "9" * 30])
def test_sizes_that_are_not(text):
    with pytest.raises(ConfigError):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_what_is_formatted_parses_to_the_same(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes
