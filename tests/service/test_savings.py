"""What sharing has saved, what is waited for, and the picture of a pool, as the snapshot tells them."""

from __future__ import annotations

import math

import pytest

from kvd.protocol import requests
from kvd.protocol.replies import Sealed
from kvd.status import BLOCK_LETTERS
from tests.service.harness import Client, House, error_code, expect, names, pack, pack_hashes


def sealed_with_report(client: Client, prompt: list, num_tokens: int, seconds: float) -> object:
    blocks = client.begin(prompt).reserved
    return client.ask(requests.Seal, 1, pack(blocks), pack_hashes(prompt), b"", num_tokens, seconds)


def test_tokens_without_a_reported_speed_are_tokens_only(house: House) -> None:
    writer, reader = house.client(), house.client()
    writer.open(), reader.open()
    prompt = names("a", "b")
    writer.seal(writer.begin(prompt).reserved, prompt)
    reader.begin(prompt)
    snapshot = writer.status().snapshot
    assert (snapshot.savings.num_tokens, snapshot.savings.num_tokens_rated, snapshot.savings.prefill_s) == (32, 0, 0.0)
    assert [client.prefill_s_saved for client in snapshot.clients] == [None, None]


def test_seconds_are_tokens_over_the_rate_that_clients_report(house: House) -> None:
    writer, reader = house.client(), house.client()
    writer.open(), reader.open()
    house.clock.now_s += 100
    prompt = names("a", "b")
    expect(Sealed, sealed_with_report(writer, prompt, 320, 10.0))  # 32 tokens a second
    reader.begin(prompt)
    reader.begin(prompt)
    snapshot = writer.status().snapshot
    assert [client.prefill_s_saved for client in snapshot.clients] == [None, 2.0]
    assert (snapshot.savings.num_tokens, snapshot.savings.num_tokens_rated, snapshot.savings.prefill_s) == (64, 64, 2.0)
    (namespace,) = snapshot.namespaces
    assert (namespace.computed_tokens, namespace.computed_s) == (320, 10.0)


def test_what_a_writer_finds_of_its_own_is_no_saving(house: House) -> None:
    writer = house.client()
    writer.open()
    prompt = names("a", "b", "c")
    writer.seal(writer.begin(prompt[:2], only_stores=True).reserved, prompt[:2])
    found = writer.begin(prompt, only_stores=True)
    assert len(found.cached) == 2
    snapshot = writer.status().snapshot
    assert snapshot.savings.num_tokens == 0
    (namespace,) = snapshot.namespaces
    assert (namespace.counters["hits"], namespace.counters["misses"], namespace.counters["lookups"]) == (0, 3, 3)


def test_what_an_ended_session_was_spared_stays_in_the_total(house: House) -> None:
    writer, reader = house.client(), house.client()
    writer.open(), reader.open()
    house.clock.now_s += 100
    prompt = names("a")
    expect(Sealed, sealed_with_report(writer, prompt, 160, 10.0))
    reader.begin(prompt)
    reader.die()
    snapshot = writer.status().snapshot
    assert len(snapshot.clients) == 1
    assert (snapshot.savings.num_tokens, snapshot.savings.prefill_s) == (16, 1.0)


def test_the_rate_of_one_namespace_says_nothing_about_another(house: House) -> None:
    client = house.client()
    client.open()
    client.open(model="other")
    house.clock.now_s += 100
    prompt, others = names("a"), names("b")
    expect(Sealed, sealed_with_report(client, prompt, 160, 10.0))
    blocks = client.begin(others, cache=2).reserved
    client.ask(requests.Seal, 2, pack(blocks), pack_hashes(others))
    client.begin(others, cache=2)
    savings = client.status().snapshot.savings
    assert (savings.num_tokens, savings.num_tokens_rated) == (16, 0)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(-1, 1.0), (1, 0.0), (0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf), (1 << 40, 1.0), (16, 1e6)],
)
def test_a_report_that_cannot_be_is_refused_before_anything_is_sealed(house: House, num_tokens, seconds) -> None:
    client = house.client()
    client.open()
    house.clock.now_s += 100
    assert error_code(sealed_with_report(client, names("a"), num_tokens, seconds)) == "invalid-request"
    assert client.match(names("a")) == 0
    assert client.status().snapshot.namespaces[0].computed_tokens == 0


def test_the_snapshot_names_who_waits_for_whom(house: House) -> None:
    first, second, third = (house.client() for _ in range(3))
    for client in (first, second, third):
        client.open()
    prompt = names("a", "b")
    first.begin(prompt)
    assert second.try_begin(prompt, wait_s=5.0) is None
    assert third.try_begin(prompt, wait_s=8.0) is None
    (wait,) = first.status().snapshot.waits
    assert (wait.what, wait.pool, wait.hash) == ("computation", 0, prompt[0].hex())
    assert (wait.writer, wait.waiting, wait.left_s) == (first.session, [second.session, third.session], 8.0)
    first.die()
    (wait,) = second.status().snapshot.waits
    assert (wait.writer, wait.waiting) == (second.session, [third.session])


def test_waiting_for_memory_is_told_too(house: House) -> None:
    house.stock.gives = False
    client, other = house.client(), house.client()
    client.open()
    assert client.try_begin(names("a")) is None
    (wait,) = other.status().snapshot.waits
    assert (wait.what, wait.pool, wait.writer, wait.waiting) == ("memory", -1, 0, [client.session])


def test_the_map_shows_each_block(house: House) -> None:
    client = house.client()
    client.open()
    prompt = names("a", "b")
    first = client.begin(prompt, 3)
    client.seal(first.reserved[:2], prompt)
    client.release(first.reserved[:1])
    assert client.status().snapshot.pools[0].block_map == ""
    (pool,) = expect_map(client)
    assert (pool.block_map, pool.map_step) == ("cuw.", 1)
    assert set(pool.block_map) <= set(BLOCK_LETTERS)


def expect_map(client: Client):
    return client.ask(requests.Status, True).snapshot.pools  # type: ignore[union-attr]


def test_a_client_is_charged_with_the_memory_it_was_given(house: House) -> None:
    client, other = house.client(), house.client()
    client.open()
    client.begin(names("a"), 5)
    seen, unseen = other.status().snapshot.clients
    assert (seen.mapped_nbytes, seen.mode, unseen.mapped_nbytes) == (2 * house.stock.segment_nbytes, "mapped", 0)
