"""Clients tell how fast they compute, so that the daemon can say how much prefill was spared."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

import kvd_client
import kvd_client.aio
from kvd.status import NamespaceStatus
from kvd_client.core.sequence_core import MIN_PREFILL_TOKENS
from tests.client.kv import LAYOUT, MODEL, fill, keys_values
from tests.support.daemon import Daemon, running_daemon

PROMPT = list(range(1, 162))


@pytest.fixture
def daemon(tmp_path) -> Iterator[Daemon]:
    with running_daemon(tmp_path) as daemon:
        yield daemon


def reported(client: kvd_client.Client) -> NamespaceStatus:
    (namespace,) = client.status().namespaces
    return namespace


def test_get_or_compute_reports_what_it_took(daemon):
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        cache.get_or_compute(PROMPT, lambda seq: fill(seq, PROMPT)).close()
        namespace = reported(client)
        assert namespace.computed_tokens == len(PROMPT)
        assert 0 < namespace.computed_s < 60
        cache.get_or_compute(PROMPT, lambda seq: fill(seq, PROMPT)).close()
        assert reported(client).computed_tokens == len(PROMPT), "one token is no prefill"
        saved = client.status().savings
        assert (saved.num_tokens, saved.num_tokens_rated) == (160, 160)
        assert saved.prefill_s == pytest.approx(160 * namespace.computed_s / len(PROMPT))


async def test_so_does_its_twin(daemon):
    async with kvd_client.aio.connect(daemon.folder) as client:
        cache = await client.cache(model=MODEL, layout=LAYOUT)

        async def compute(seq: kvd_client.aio.Sequence) -> None:
            for layer in range(LAYOUT.num_layers):
                await seq.append(layer, *keys_values(layer, PROMPT, seq.num_cached_tokens, len(PROMPT)))

        await (await cache.get_or_compute(PROMPT, compute)).close()
        (namespace,) = (await client.status()).namespaces
        assert namespace.computed_tokens == len(PROMPT)


def test_what_is_told_by_hand_goes_with_the_next_commit(daemon):
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence(PROMPT) as seq:
            assert seq.num_missing_tokens == len(PROMPT)
            fill(seq, PROMPT)
            assert seq.num_missing_tokens == 0
            seq.computed(100, 0.25)
            seq.computed(61, 0.05)
            assert reported(client).computed_tokens == 0
            seq.commit()
        assert (reported(client).computed_tokens, reported(client).computed_s) == (100, 0.25)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(MIN_PREFILL_TOKENS - 1, 1.0), (1000, 0.0), (1000, -1.0), (1000, math.nan), (1000, math.inf), (1000, 600.0)],
)
def test_what_says_nothing_of_a_prefill_is_passed_over(daemon, num_tokens, seconds):
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence(PROMPT) as seq:
            fill(seq, PROMPT)
            seq.computed(num_tokens, seconds)
            seq.commit()
        assert reported(client).computed_tokens == 0


def test_who_only_stores_has_saved_nothing(daemon):
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        cache.get_or_compute(PROMPT, lambda seq: fill(seq, PROMPT)).close()
        with cache.sequence(PROMPT, attach_all=True, only_stores=True) as seq:
            assert seq.num_cached_tokens == 160
        assert client.status().savings.num_tokens == 0
        with cache.sequence(PROMPT) as seq:
            assert seq.num_cached_tokens == 160
        assert client.status().savings.num_tokens == 160
