"""Verification goes through all sealed blocks in bounded steps, and drops what differs from its checksum."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvd.protocol import requests
from kvd.protocol.replies import Verified
from kvd.service import verifying
from tests.service.harness import BLOCK_NBYTES, Client, House, error_code, expect, names

GOOD = xxhash.xxh3_64_intdigest(bytes(BLOCK_NBYTES))


def sealed(client: Client, words: str, checksum: int) -> None:
    prompt = names(*words)
    client.seal(client.begin(prompt).reserved, prompt, struct.pack("<Q", checksum) * len(prompt))


def verify_all(client: Client) -> tuple[int, int, list[str], int]:
    cursor, num_verified, num_unchecked, num_steps, corrupt = 0, 0, 0, 0, []
    while True:
        step = expect(Verified, client.ask(requests.Verify, cursor))
        num_steps += 1
        num_verified += step.num_verified
        num_unchecked += step.num_unchecked
        corrupt += step.corrupt
        assert step.cursor == 0 or step.cursor > cursor, "it goes on"
        if not (cursor := step.cursor):
            return num_verified, num_unchecked, corrupt, num_steps


@pytest.fixture
def admin(house: House) -> Client:
    client = house.client(uid=0)
    client.open()
    return client


@pytest.mark.parametrize("max_nbytes", [1, BLOCK_NBYTES, 3 * BLOCK_NBYTES, 1 << 30])
def test_each_block_is_looked_at_once_however_small_the_steps(house, admin, monkeypatch, max_nbytes):
    monkeypatch.setattr(verifying, "MAX_NBYTES", max_nbytes)
    sealed(admin, "abc", GOOD)
    sealed(admin, "x", 0)
    other = house.client(uid=0)
    other.open(num_layers=2, block_nbytes=2 * BLOCK_NBYTES)
    sealed(other, "y", 0)
    num_verified, num_unchecked, corrupt, num_steps = verify_all(admin)
    assert (num_verified, num_unchecked, corrupt) == (3, 2, [])
    assert (num_steps == 1) is (max_nbytes == 1 << 30)


def test_what_differs_is_dropped(house, admin):
    sealed(admin, "ab", GOOD)
    sealed(admin, "c", GOOD ^ 1)
    (bad,) = names("c")
    assert verify_all(admin)[2] == [bad.hex()]
    assert admin.match(names("c")) == 0
    assert admin.match(names("a", "b")) == 2
    house.check()
    assert verify_all(admin)[:3] == (2, 0, [])


def test_many_blocks_without_checksums_take_several_steps(house, admin, monkeypatch):
    monkeypatch.setattr(verifying, "MAX_LOOKED_AT", 2)
    sealed(admin, "abcde", 0)
    assert verify_all(admin) == (0, 5, [], 3)


@pytest.mark.parametrize("cursor", [-1, 1, 1 << 62, 1 << 100])
def test_any_cursor_is_harmless(admin, cursor):
    sealed(admin, "ab", GOOD)
    admin.ask(requests.Verify, cursor)
    assert verify_all(admin)[0] == 2


def test_only_administrators_may(house, admin):
    assert error_code(house.client(uid=1000).ask(requests.Verify)) == "permission-refused"
