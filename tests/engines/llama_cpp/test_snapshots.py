"""Snapshots by longest common prefix, over a real daemon."""

from __future__ import annotations

import pytest

import kvd_client
from kvd.errors import CorruptBlock
from kvd.hashing import encode_tokens
from kvd_client.engines.llama_cpp.snapshots import STEP_TOKENS, Snapshots, _keys, num_common_tokens


@pytest.fixture
def snapshots(client: kvd_client.Client, salt: str) -> Snapshots:
    return Snapshots(client.blobs("states", salt=salt, block_nbytes=64 << 10))


def tokens(num: int, other_from: int | None = None) -> bytes:
    """0, 1, 2, ...; from one place on others."""
    start = num if other_from is None else other_from
    return encode_tokens([*range(start), *(place + 10_000 for place in range(start, num))])


def found(snapshots: Snapshots, prompt: bytes, **options: object) -> tuple[int, bytes] | None:
    snapshot = snapshots.find(prompt, **options)
    return None if snapshot is None else (snapshot.num_tokens, bytes(snapshot.state))


def test_the_longest_snapshot_that_matches_is_found(snapshots):  # case E6
    assert found(snapshots, tokens(500)) is None
    assert snapshots.save(tokens(100), b"short")
    assert snapshots.save(tokens(300), b"longer")
    assert found(snapshots, tokens(500)) == (288, b"longer")
    assert found(snapshots, tokens(310)) == (288, b"longer")


def test_a_diverging_prompt_takes_what_is_common(snapshots):  # case E6
    snapshots.save(tokens(300), b"one")
    snapshots.save(tokens(300, other_from=200), b"other")
    assert found(snapshots, tokens(400, other_from=200))[0] == 288
    assert found(snapshots, tokens(400, other_from=250)) == (224, b"one")
    assert found(snapshots, tokens(400, other_from=40))[0] == 32
    assert found(snapshots, tokens(400, other_from=31)) is None


def test_what_is_common_already_is_not_looked_for(snapshots):
    snapshots.save(tokens(100), b"state")
    assert found(snapshots, tokens(200), more_than=64) == (96, b"state")
    assert found(snapshots, tokens(200), more_than=96) is None


def test_a_state_that_adds_nothing_is_not_kept(snapshots):
    assert not snapshots.save(tokens(STEP_TOKENS - 1), b"too short to be found")
    assert snapshots.save(tokens(200), b"first")
    assert not snapshots.save(tokens(200), b"second")
    assert not snapshots.save(tokens(240), b"hardly longer", at_least=2 * STEP_TOKENS)
    assert found(snapshots, tokens(300)) == (192, b"first")


def test_the_newest_state_serves_what_it_has_in_common_with_older_ones(snapshots):
    snapshots.save(tokens(100), b"old")
    snapshots.save(tokens(300), b"new")
    assert found(snapshots, tokens(100)) == (96, b"new")


def test_one_that_is_not_worth_it_is_left_where_it_is(snapshots):
    asked = []

    def is_worth(num_tokens: int, nbytes: int) -> bool:
        asked.append((num_tokens, nbytes))
        return False

    snapshots.save(tokens(100), b"12345")
    assert found(snapshots, tokens(200), is_worth=is_worth) is None
    assert asked == [(96, 5)]


def test_when_a_state_is_gone_an_earlier_one_is_taken(snapshots):
    long = tokens(40 * STEP_TOKENS)
    snapshots.save(long, b"long")
    keys, blobs = _keys(long), snapshots._blobs
    blobs.put(keys[0], b"short", replace=True)
    blobs.delete(keys[-1])
    assert snapshots.longest(long) == 39 * STEP_TOKENS, "its other keys are still there"
    assert found(snapshots, long) == (STEP_TOKENS, b"short")


# case E5
def test_a_state_whose_bytes_changed_is_passed_over(snapshots, monkeypatch):
    prompt = tokens(4 * STEP_TOKENS)
    snapshots.save(prompt, b"long")
    keys, blobs = _keys(prompt), snapshots._blobs
    blobs.put(keys[0], b"short", replace=True)
    get = blobs.get

    def compared(key: bytes, **options: object) -> memoryview | None:
        if key != keys[0]:
            raise CorruptBlock("other bytes than were saved")
        return get(key, **options)

    monkeypatch.setattr(blobs, "get", compared)
    assert found(snapshots, prompt) == (STEP_TOKENS, b"short")


@pytest.mark.parametrize(("one", "other", "common"), [(0, 9, 0), (9, 9, 9), (9, 5, 5), (5, 9, 5)])
def test_common_tokens_of_prefixes(one, other, common):
    assert num_common_tokens(tokens(one), tokens(other)) == common


@pytest.mark.parametrize("place", range(10))
def test_common_tokens_end_at_the_first_difference(place):
    assert num_common_tokens(tokens(10), tokens(10, other_from=place)) == place
