"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kvd.cli.text import count, duration, one_line, percent, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (368_640, "360 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (16 << 30, "16 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (42, "42 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (10**6, "11 d 13 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "-"), (0, 5, "0 %"), (1, 1000, "1 %"), (999, 1000, "99 %"), (5, 5, "100 %"), (1, 2, "50 %")],
)
def test_shares(part, whole, text):
    assert percent(part, whole) == text


def test_counts_have_their_thousands_apart():
    assert count(1_048_576) == "1,048,576"


def test_a_message_is_one_line():
    assert one_line("a\n  b\x1b[0m") == "a b?[0m"
