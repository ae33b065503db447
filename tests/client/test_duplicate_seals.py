"""Two writers of the same block: one block stands, and the loser's tensors are its own."""

from __future__ import annotations

import torch

import kvd_client
from tests.client.homes import let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds, keys_values
from tests.support.daemon import Daemon

PROMPT = list(range(100, 148))


def two_writers(client: kvd_client.Client) -> tuple[kvd_client.Sequence, kvd_client.Sequence]:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    first, second = cache.sequence(PROMPT), cache.sequence(PROMPT, wait_s=0)
    for seq in (first, second):
        fill(seq, PROMPT)
    return first, second


def own_figures(client: kvd_client.Client) -> tuple[int, int]:
    client.check()
    (own,) = [entry for entry in client.status().clients if entry.session == client.session_id]
    return own.num_references, own.num_reserved


def test_a_copy_nobody_looks_at_gives_way_to_the_block_that_stands(client: kvd_client.Client) -> None:
    first, second = two_writers(client)
    first.commit()
    _, reserved = own_figures(client)
    assert second.commit() == 48
    assert own_figures(client) == (6, reserved - 3)
    assert holds(second, PROMPT, 48)
    # The same physical block now: a trace left by the first writer's own mapping of it would show in both.
    second.close()
    assert holds(first, PROMPT, 48)
    first.close()
    assert own_figures(client) == (0, 0)


# case A10
def test_a_writer_with_tensors_over_its_copy_keeps_its_copy(client: kvd_client.Client, daemon: Daemon) -> None:
    first, second = two_writers(client)
    keys, values = second.layer(2)
    marked = [*PROMPT]
    first.commit()
    _, reserved = own_figures(client)
    second.commit()
    # Still reserved by the writer: nobody can be given the memory under the tensors.
    assert own_figures(client) == (6, reserved)
    assert torch.equal(keys, keys_values(2, PROMPT, 0, 48)[0])
    # The writer goes on: neither sequence sees the other.
    fill(second, [*marked, *[1] * 40])
    fill(first, [*marked, *[2] * 40])
    second.commit([*marked, *[1] * 40])
    first.commit([*marked, *[2] * 40])
    assert holds(first, [*marked, *[2] * 40], 88)
    assert holds(second, [*marked, *[1] * 40], 88)
    # Others fill every free block with something else; the tensors keep showing what they showed.
    with kvd_client.connect(daemon.folder) as other:
        cache = other.cache(model=MODEL, layout=LAYOUT, salt="noise")
        free = sum(pool.num_free for pool in other.status().pools)
        with cache.allocate_sequence(free * LAYOUT.block_tokens) as noise:
            noise.array(0, free * LAYOUT.block_tokens).fill_(77)
            assert torch.equal(keys, keys_values(2, PROMPT, 0, 48)[0])
            assert torch.equal(values, keys_values(2, PROMPT, 0, 48)[1])
            assert holds(first, [*marked, *[2] * 40], 88)
    second.close()
    first.close()
    assert torch.equal(keys, keys_values(2, PROMPT, 0, 48)[0])
    assert own_figures(client)[1] >= 3
    del keys, values
    let_go()
    assert own_figures(client) == (0, 0)


def test_the_copy_goes_back_at_a_later_commit_once_the_tensors_are_gone(client: kvd_client.Client) -> None:
    first, second = two_writers(client)
    keys, _values = second.layer(0)
    first.commit()
    second.commit()
    before = own_figures(client)
    del keys, _values
    second.commit()
    assert own_figures(client) == (before[0], before[1] - 3)
    assert holds(second, PROMPT, 48)
    with second.fork() as fork:
        assert holds(fork, PROMPT, 48)
    first.close()
    second.close()
    assert own_figures(client) == (0, 0)
