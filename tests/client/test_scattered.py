"""Sequences whose blocks are no neighbours: mapped side by side on host memory, gathered once on a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import kvd_client
from tests.client.homes import let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.client.processes import Worker
from tests.fakecuda.machine import FakeMachine

PROMPT = list(range(700, 800))
NUM_BLOCKS = 16 * ((4 << 20) // LAYOUT.block_nbytes)
"""All that the budget gives."""


@pytest.fixture
def cache(client: kvd_client.Client) -> Iterator[kvd_client.Cache]:
    """Every second block of all there is, in a pool that nobody used before, is free."""
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.allocate_sequence(NUM_BLOCKS * LAYOUT.block_tokens, populate=False) as taken:
        core = taken._core
        core._post_release(reserved=core._blocks[::2])
        # Not to be given back again at the end.
        core._blocks = core._blocks[1::2]
        yield cache
    let_go()


def test_what_is_scattered_is_copied_once_on_a_card_and_never_on_host_memory(
    cache: kvd_client.Cache, home: FakeMachine | None
) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
        assert seq.num_copied_bytes == 0, "it is written where it lies, or goes to its blocks with the seal"
        with seq.fork() as other, other.fork() as third:
            for fork in (other, third):
                assert fork.num_copied_bytes == (4 if home is None else 100) * LAYOUT.token_nbytes
            left, right = [*PROMPT, *[1] * 30], [*PROMPT, *[2] * 30]
            fill(other, left)
            fill(third, right)
            assert holds(seq, PROMPT, 100)
            assert holds(other, left, 130)
            assert holds(third, right, 130)
    with cache.sequence(PROMPT) as found:
        for layer in range(LAYOUT.num_layers):
            found.layer(layer)
        fill(found, PROMPT)
        assert holds(found, PROMPT, 100)
        assert found.num_copied_bytes == (0 if home is None else 96) * LAYOUT.token_nbytes


def test_a_scattered_sequence_grows_and_is_cut_with_the_same_bytes(
    cache: kvd_client.Cache, home: FakeMachine | None, start_worker: Callable[[], Worker]
) -> None:
    reader = start_worker()
    with cache.sequence(PROMPT, max_tokens=600) as seq:
        fill(seq, PROMPT)
        assert seq.is_materialized == (home is not None)
        assert seq.commit() == 96
        longer = [*PROMPT, *[5] * 400]
        fill(seq, longer)
        assert holds(seq, longer, 500)
        assert seq.commit(longer) == 496
    assert reader.call("begin", tokens=longer) == 496
    assert reader.call("holds") is True
    with cache.sequence([*longer, 1]) as seq:
        assert seq.num_copied_bytes == (0 if home is None else 31) * LAYOUT.block_nbytes
        assert holds(seq, longer, 496)
        with seq.fork() as other:
            fill(other, [*longer, *[6] * 100])
            assert holds(other, [*longer, *[6] * 100], 600)
        seq.truncate(200)
        fill(seq, [*longer[:200], *[7] * 50])
        assert holds(seq, [*longer[:200], *[7] * 50], 250)
