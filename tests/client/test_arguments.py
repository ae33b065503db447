"""What is no number, or no order of tokens, is refused by type before anything is asked, and nothing is lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvd_client
import kvd_client.aio
from kvd.errors import InvalidRequest, InvalidTokens, SequenceTooLong
from kvd_client.arguments import seconds, whole_number
from tests.client.kv import LAYOUT, MODEL, fill, holds, keys_values
from tests.support.daemon import Daemon

PROMPT = list(range(2000, 2100))
NO_COUNTS: tuple[Any, ...] = (True, np.True_, torch.tensor(True), 1.0, np.float64(1), math.nan, math.inf, "1", None, -1)
NO_TIMES: tuple[Any, ...] = (math.nan, math.inf, -1, -0.1, "1", b"1", True, 86_401, [1], 10**400)
NO_ORDER: tuple[Any, ...] = ({1, 2}, frozenset({1, 2}), {1: 2}, {1: 2}.keys())


@pytest.fixture
def cache(client: kvd_client.Client) -> kvd_client.Cache:
    return client.cache(model=MODEL, layout=LAYOUT)


@pytest.fixture
def seq(cache: kvd_client.Cache, client: kvd_client.Client) -> Iterator[kvd_client.Sequence]:
    """100 tokens, 96 of them sealed; checked to be what it was when the test is over."""
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
        before = figures(client), seq.num_tokens, seq.capacity_tokens, seq.token_ids
        yield seq
        assert (figures(client), seq.num_tokens, seq.capacity_tokens, seq.token_ids) == before
        assert holds(seq, PROMPT, 100)
        fill(seq, [*PROMPT, *[1] * 300])
        assert holds(seq, [*PROMPT, *[1] * 300], 400)
    assert figures(client) == (0, 0, 0)


def figures(client: kvd_client.Client) -> tuple[int, int, int]:
    client.check()
    (own,) = client.status().clients
    return own.num_references, own.num_reserved, own.num_announced


def refuse(call: Callable[[Any], object], values: tuple[Any, ...], error: type[Exception] = InvalidRequest) -> None:
    for value in values:
        with pytest.raises(error):
            call(value)


OF_A_SEQUENCE: dict[str, Callable[[kvd_client.Sequence, Any], object]] = {
    "extend": lambda seq, value: seq.extend(value),
    "truncate": lambda seq, value: seq.truncate(value),
    "advance": lambda seq, value: seq.advance(value),
    "layer": lambda seq, value: seq.layer(value),
    "num_tokens_in": lambda seq, value: seq.num_tokens_in(value),
    "append": lambda seq, value: seq.append(value, *keys_values(1, PROMPT, 0, 1)),
    "get_or_compute": lambda seq, value: seq.get_or_compute(value, lambda start, stop: keys_values(1, PROMPT, 0, 1)),
    "array from": lambda seq, value: seq.array(value, 50),
    "array to": lambda seq, value: seq.array(0, value),
    "buffer from": lambda seq, value: seq.buffer(value, 50),
    "buffer to": lambda seq, value: seq.buffer(0, value),
    "fork": lambda seq, value: seq.fork(value),
}
LEFT_OUT = {"array to", "buffer to", "fork"}
"""Where None means the default."""


@pytest.mark.parametrize("verb", OF_A_SEQUENCE)
def test_a_sequence_takes_whole_numbers_only(seq: kvd_client.Sequence, verb: str) -> None:
    values = tuple(value for value in NO_COUNTS if value is not None or verb not in LEFT_OUT)
    refuse(lambda value: OF_A_SEQUENCE[verb](seq, value), values)
    refuse(lambda value: OF_A_SEQUENCE[verb](seq, value), (2**63, 2**200, 50.5))


@pytest.mark.parametrize("integer", [np.int64, np.uint32, np.uint8, torch.tensor])
def test_integers_of_every_kind_are_welcome(cache: kvd_client.Cache, integer: Callable[[int], Any]) -> None:
    with cache.sequence(PROMPT, integer(200), wait_s=integer(0)) as seq:
        for layer in range(LAYOUT.num_layers):
            seq.append(integer(layer), *keys_values(layer, PROMPT, 0, 100))
        assert torch.equal(seq.layer(integer(1))[0], keys_values(1, PROMPT, 0, 100)[0])
        seq.extend(integer(150))
        seq.advance(integer(20))
        seq.truncate(integer(100))
        assert seq.array(integer(2), integer(50)).shape[0] == 48
        assert (seq.num_tokens, seq.max_tokens) == (100, 200)
        with seq.fork(integer(120)) as other:
            assert other.max_tokens == 120
        assert holds(seq, PROMPT, 100)


NO_TENSORS: tuple[Any, ...] = (None, [1.0], np.zeros((2, 1, 64), np.float16), "keys", 1)


def test_only_tensors_can_be_appended(seq: kvd_client.Sequence) -> None:
    good = keys_values(0, PROMPT, 0, 1)[0]
    refuse(lambda value: seq.append(0, value, value), NO_TENSORS)
    refuse(lambda value: seq.append(0, good, value), NO_TENSORS)
    refuse(lambda value: seq.append(0, value, good), NO_TENSORS)


@pytest.mark.parametrize("ids", NO_ORDER, ids=lambda ids: type(ids).__name__)
def test_token_ids_without_an_order_are_refused(cache: kvd_client.Cache, seq: kvd_client.Sequence, ids: Any) -> None:
    calls = (cache.sequence, cache.match, cache.reach, cache.prefetch, seq.add_tokens, seq.commit)
    for call in (*calls, seq.num_matching_tokens, seq.require_prefix_of):
        with pytest.raises(InvalidTokens, match="no order"):
            call(ids)


@pytest.mark.parametrize("ids", [5, None, 1.5, object()], ids=lambda ids: type(ids).__name__)
def test_what_holds_no_token_ids_is_refused(cache: kvd_client.Cache, ids: Any) -> None:
    with pytest.raises(InvalidTokens, match="in a sequence"):
        cache.sequence(ids)


def test_waits_and_bounds_of_a_new_sequence(cache: kvd_client.Cache, client: kvd_client.Client) -> None:
    refuse(lambda value: cache.sequence(PROMPT, wait_s=value), NO_TIMES)
    refuse(lambda value: cache.get_or_compute(PROMPT, lambda _: None, wait_s=value), NO_TIMES)
    bounds = tuple(value for value in NO_COUNTS if value is not None)
    refuse(lambda value: cache.sequence(PROMPT, value), (*bounds, 2**63, 2**32, 99))
    refuse(lambda value: cache.allocate_sequence(10, value), (*bounds, 2**63, 2**32, 9))
    refuse(cache.allocate_sequence, (*NO_COUNTS, 0, 2**63))
    refuse(lambda value: cache.allocate_sequence(value, 100), (*NO_COUNTS, 0, 2**63))
    with pytest.raises(SequenceTooLong):
        cache.sequence(PROMPT, 99)
    assert figures(client) == (0, 0, 0)


def test_what_a_client_and_its_blobs_take(client: kvd_client.Client, cache: kvd_client.Cache) -> None:
    refuse(lambda value: client.reach(cache.digest, value, PROMPT), (*NO_COUNTS, 0))
    refuse(lambda ids: client.reach(cache.digest, 16, ids), NO_ORDER, InvalidTokens)
    refuse(cache.pin, NO_ORDER, InvalidTokens)
    refuse(lambda value: client.blobs("any").get(b"key", wait_s=value), NO_TIMES)
    assert figures(client) == (0, 0, 0)


def test_the_asyncio_client_refuses_the_same(daemon: Daemon) -> None:
    async def try_all() -> None:
        async with kvd_client.aio.connect(daemon.folder) as client:
            cache = await client.cache(model=MODEL, layout=LAYOUT)
            for ids in NO_ORDER:
                with pytest.raises(InvalidTokens):
                    await cache.sequence(ids)
            for wait_s in NO_TIMES:
                with pytest.raises(InvalidRequest):
                    await cache.sequence(PROMPT, wait_s=wait_s)
            async with await cache.sequence(PROMPT) as seq:
                for number in NO_COUNTS:
                    with pytest.raises(InvalidRequest):
                        await seq.extend(number)
                    with pytest.raises(InvalidRequest):
                        await seq.truncate(number)
                for tensor in NO_TENSORS:
                    with pytest.raises(InvalidRequest):
                        await seq.append(0, tensor, tensor)
            await client.check()
            (own,) = (await client.status()).clients
            assert (own.num_references, own.num_reserved, own.num_announced) == (0, 0, 0)

    asyncio.run(try_all())


def test_options_of_a_client(daemon: Daemon) -> None:
    refuse(lambda value: kvd_client.connect(daemon.folder, timeout_s=value), NO_TIMES)
    refuse(lambda value: kvd_client.connect(daemon.folder, reserve_ahead_tokens=value), (*NO_COUNTS, 2**32))


@pytest.mark.parametrize("reserve_ahead_tokens", [0, 64])
def test_an_empty_prompt_is_an_empty_sequence_that_grows(daemon: Daemon, reserve_ahead_tokens: int) -> None:
    with kvd_client.connect(daemon.folder, reserve_ahead_tokens=reserve_ahead_tokens) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence([]) as seq:
            assert (seq.num_tokens, seq.token_ids, seq.num_cached_tokens) == (0, [], 0)
            assert seq.array().shape[0] == 0
            with seq.fork() as other:
                assert other.num_tokens == 0
            fill(seq, PROMPT)
            assert seq.commit(PROMPT) == 96
            assert holds(seq, PROMPT, 100)
        with cache.sequence([], 0) as nothing, pytest.raises(SequenceTooLong):
            nothing.extend(1)
        with cache.sequence(PROMPT) as again:
            assert again.num_cached_tokens == 96
        assert figures(client) == (0, 0, 0)


def test_a_full_pool_leaves_an_empty_prompt_an_empty_sequence(
    cache: kvd_client.Cache, client: kvd_client.Client
) -> None:
    num_blocks = (4 << 20) // LAYOUT.block_nbytes * 16
    with cache.allocate_sequence(num_blocks * LAYOUT.block_tokens), cache.sequence([]) as seq:
        assert seq.capacity_tokens == 0


def test_what_a_refusal_says() -> None:
    assert whole_number("n", 3, most=3) == 3
    with pytest.raises(InvalidRequest, match=r"^n must be a whole number from 0 to 3, not 4$"):
        whole_number("n", 4, most=3)
    with pytest.raises(InvalidRequest, match=r"^n must be a whole number from 1 on, not 0$"):
        whole_number("n", 0, least=1)
    with pytest.raises(InvalidRequest, match=r"^n must be a whole number, not True$"):
        whole_number("n", True)
    with pytest.raises(InvalidRequest, match=r"^wait_s must be from 0 to 86400 seconds, not nan$"):
        seconds("wait_s", math.nan)
    assert seconds("wait_s", np.float32(0.5)) == 0.5
