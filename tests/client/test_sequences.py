"""Attach, append, extend, commit, truncate, fork: every byte compared with what it must be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvd_client
from kvd.errors import (
    ClientClosed,
    InvalidLayout,
    InvalidRequest,
    InvalidTokens,
    OutOfBlocks,
    SequenceTooLong,
)
from kvd.layout import KVLayout
from tests.client.homes import empty_the_pool, host_only, let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds, keys_values
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import Daemon, running_daemon

PROMPT = [7 * i % 1000 + 300 for i in range(100)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, home: FakeMachine | None) -> Iterator[Daemon]:
    """One for all of these; each test has a namespace of its own."""
    with running_daemon(tmp_path_factory.mktemp("kvd"), budget="64MiB", segment="4MiB", machine=home) as daemon:
        yield daemon


@pytest.fixture
def cache(client: kvd_client.Client, request: pytest.FixtureRequest) -> kvd_client.Cache:
    return client.cache(model=MODEL, layout=LAYOUT, salt=request.node.name)


@pytest.fixture
def empty_pool(client: kvd_client.Client) -> None:
    empty_the_pool(client)


def publish(cache: kvd_client.Cache, tokens: list[int]) -> None:
    with cache.sequence(tokens) as seq:
        fill(seq, tokens)
        seq.commit()


def held(client: kvd_client.Client) -> tuple[int, int]:
    """References and reservations of this session, as the daemon counts them after checking itself."""
    client.check()
    (own,) = [entry for entry in client.status().clients if entry.session == client.session_id]
    return own.num_references, own.num_reserved


def test_an_empty_cache_attaches_nothing(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        assert (seq.num_cached_tokens, seq.num_tokens, seq.max_tokens) == (0, 0, 100 + 1024)
        assert seq.capacity_tokens >= 100
        assert seq.token_ids == PROMPT


@pytest.mark.usefixtures("empty_pool")
def test_full_blocks_are_found_again_with_their_bytes(cache: kvd_client.Cache, client: kvd_client.Client) -> None:
    publish(cache, PROMPT)
    with cache.sequence(PROMPT) as seq:
        assert seq.num_cached_tokens == seq.num_tokens == 96
        assert seq.num_copied_bytes == 0
        assert holds(seq, PROMPT, 96)
        fill(seq, PROMPT)
        assert holds(seq, PROMPT, 100)
    assert held(client) == (0, 0)


# case A7
def test_a_partial_block_is_never_found_and_a_whole_prompt_leaves_a_token(cache: kvd_client.Cache) -> None:
    publish(cache, PROMPT)
    assert cache.match(PROMPT) == 96
    assert cache.match(PROMPT[:95]) == 80
    for length, attached in ((96, 80), (97, 96), (100, 96), (17, 16), (16, 0), (1, 0)):
        with cache.sequence(PROMPT[:length]) as seq:
            assert seq.num_cached_tokens == attached <= length - 1


def test_a_diverging_prompt_shares_what_is_common(cache: kvd_client.Cache) -> None:
    publish(cache, PROMPT)
    other = [*PROMPT[:50], *[5] * 50]
    with cache.sequence(other) as seq:
        assert seq.num_cached_tokens == 48
        fill(seq, other)
        seq.commit()
        assert holds(seq, other, 100)
    with cache.sequence(PROMPT) as seq:
        assert holds(seq, PROMPT, 96)


# case A2
@pytest.mark.parametrize("kind", ["tuple", "int64", "uint32", "torch", "torch 1 x n"])
def test_token_ids_of_any_kind_find_the_same_blocks(cache: kvd_client.Cache, kind: str) -> None:
    import numpy as np

    ids = [70000, *PROMPT, 4_000_000_000]
    given = {
        "tuple": tuple(ids),
        "int64": np.array(ids, dtype=np.int64),
        "uint32": np.array(ids, dtype=np.uint32),
        "torch": torch.tensor(ids),
        "torch 1 x n": torch.tensor([ids]),
    }[kind]
    publish(cache, ids)
    assert cache.match(given) == 96
    with cache.sequence(given) as seq:
        assert seq.num_cached_tokens == 96
        assert seq.token_ids == ids


# case A2
@pytest.mark.parametrize("bad", [[-1], [2**32], [1.0], [True], "text", torch.tensor([1.5])])
def test_other_token_ids_are_refused(cache: kvd_client.Cache, bad: object) -> None:
    with pytest.raises(InvalidTokens):
        cache.sequence(bad)  # type: ignore[arg-type]


# case A8
def test_a_sequence_of_other_tokens_is_not_taken_for_the_prompt(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.require_prefix_of([*PROMPT, 1, 2])
        assert seq.num_matching_tokens([*PROMPT[:42], 9, 9]) == 42
        for other in ([*PROMPT[:99], 9], PROMPT[:99], [9, *PROMPT]):
            with pytest.raises(InvalidTokens):
                seq.require_prefix_of(other)
        seq.append(0, *keys_values(0, [*PROMPT, 1], 100, 101))
        with pytest.raises(InvalidTokens, match="101 tokens are written but only 100 are named"):
            seq.require_prefix_of([*PROMPT, 1])


@pytest.mark.usefixtures("empty_pool")
def test_growing_beyond_what_is_reserved_asks_seldom_and_moves_nothing(
    cache: kvd_client.Cache, client: kvd_client.Client
) -> None:
    tokens = [i % 900 for i in range(700)]
    with cache.sequence(tokens[:10], max_tokens=700) as seq:
        fill(seq, tokens[:10])
        keys, _ = seq.layer(0)
        address = keys.data_ptr()
        before = client.status().counters["requests"]
        for stop in range(11, 701):
            fill(seq, tokens, stop)
        assert client.status().counters["requests"] - before < 20
        assert seq.layer(0)[0].data_ptr() == address
        assert holds(seq, tokens, 700)
        seq.add_tokens(tokens[10:])
        assert seq.commit() == 688
        assert holds(seq, tokens, 700)
        assert torch.equal(keys, keys_values(0, tokens, 0, 10)[0])
    with cache.sequence(tokens) as seq:
        assert seq.num_cached_tokens == 688
        assert holds(seq, tokens, 688)


def test_max_tokens_is_a_bound_and_nothing_changes_beyond_it(
    cache: kvd_client.Cache, client: kvd_client.Client
) -> None:
    with pytest.raises(SequenceTooLong):
        cache.sequence(PROMPT, max_tokens=99)
    with cache.sequence(PROMPT, max_tokens=101) as seq:
        fill(seq, PROMPT)
        before = held(client)
        for layer in range(3):
            with pytest.raises(SequenceTooLong):
                seq.append(layer, *keys_values(layer, [1] * 102, 100, 102))
        with pytest.raises(SequenceTooLong):
            seq.extend(102)
        with pytest.raises(SequenceTooLong):
            seq.add_tokens([1, 2])
        assert held(client) == before
        assert holds(seq, PROMPT, 100)
        fill(seq, [*PROMPT, 1])
        assert seq.num_tokens == 101


def test_only_what_is_named_and_written_in_all_layers_is_sealed(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT[:20]) as seq:
        for layer in range(2):
            seq.append(layer, *keys_values(layer, PROMPT, 0, 40))
        assert seq.commit() == 0
        seq.append(2, *keys_values(2, PROMPT, 0, 35))
        assert (seq.num_tokens, seq.commit()) == (35, 16)
        assert seq.commit(PROMPT[:40]) == 32
        with pytest.raises(InvalidTokens, match="differ at token 39 of 40"):
            seq.commit([*PROMPT[:39], 1, 2])
        assert seq.num_sealed_tokens == 32
    assert cache.match(PROMPT) == 32


def test_wrong_shapes_dtypes_and_layers_are_refused_before_anything_is_written(cache: kvd_client.Cache) -> None:
    keys, values = keys_values(0, PROMPT, 0, 4)
    with cache.sequence(PROMPT) as seq:
        for bad in (keys[:1], keys[:, :, :32], keys[None], keys.float(), keys[:, :3]):
            with pytest.raises(InvalidRequest):
                seq.append(0, keys, bad)
        for layer in (-1, 3):
            with pytest.raises(InvalidRequest):
                seq.append(layer, keys, values)
            with pytest.raises(InvalidRequest):
                seq.layer(layer)
        assert seq.num_tokens_in(0) == 0


def test_gradients_and_inference_mode_do_not_get_in_the_way(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        keys, values = keys_values(0, PROMPT, 0, 2)
        with torch.inference_mode():
            seq.append(0, keys, values)
        seq.append(0, keys.requires_grad_(), values)
        assert not seq.layer(0)[0].requires_grad
        assert torch.equal(seq.layer(0)[0][:, :2], seq.layer(0)[0][:, 2:])


@pytest.mark.parametrize("cut", [99, 97, 96, 95, 90, 80, 64, 17, 16, 1, 0])
def test_a_cut_sequence_goes_on_with_other_tokens(cache: kvd_client.Cache, client: kvd_client.Client, cut: int) -> None:
    other = [*PROMPT[:cut], *[11] * (120 - cut)]
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
        seq.truncate(cut)
        assert seq.num_tokens == cut
        assert seq.token_ids == PROMPT[:cut]
        assert holds(seq, PROMPT, cut)
        fill(seq, other)
        assert holds(seq, other, 120)
        seq.commit(other)
        assert holds(seq, other, 120)
    assert held(client) == (0, 0)
    for tokens, length in ((PROMPT, 96), (other, 112)):
        with cache.sequence([*tokens, 1]) as seq:
            assert seq.num_cached_tokens == length
            assert holds(seq, tokens, length)


def test_what_was_found_and_is_cut_off_counts_no_more_as_found(cache: kvd_client.Cache) -> None:
    publish(cache, PROMPT)
    with cache.sequence(PROMPT) as seq:
        assert seq.num_cached_tokens == 96
        seq.truncate(48)
        assert seq.num_cached_tokens == 48
        with seq.fork() as other:
            assert other.num_cached_tokens == 48


@pytest.mark.parametrize("commit_first", [True, False])
@pytest.mark.parametrize("cut", [99, 90, 40, 0])
def test_tensors_keep_their_bytes_through_a_cut(
    cache: kvd_client.Cache, client: kvd_client.Client, cut: int, commit_first: bool
) -> None:
    other = [*PROMPT[:cut], *[11] * (120 - cut)]
    seq = cache.sequence(PROMPT)
    fill(seq, PROMPT)
    if commit_first:
        seq.commit()
    keys, values = seq.layer(1)
    seq.truncate(cut)
    fill(seq, other)
    seq.commit(other)
    assert holds(seq, other, 120)
    right = keys_values(1, PROMPT, 0, 100)
    assert torch.equal(keys, right[0])
    assert torch.equal(values, right[1])
    seq.close()
    let_go()
    assert held(client) != (0, 0)
    assert torch.equal(keys, right[0])
    del keys, values
    let_go()
    assert held(client) == (0, 0)


def test_a_cut_behind_the_end_is_refused(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        for bad in (101, -1):
            with pytest.raises(InvalidRequest):
                seq.truncate(bad)
        assert holds(seq, PROMPT, 100)


@pytest.mark.usefixtures("empty_pool")
@pytest.mark.parametrize("committed", [100, 50, 0])
def test_a_fork_and_its_origin_do_not_see_each_other(
    cache: kvd_client.Cache, client: kvd_client.Client, committed: int
) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT, committed or None)
        if committed:
            seq.commit()
            fill(seq, PROMPT)
        with seq.fork() as other:
            # The partial tail, and nothing else, was copied.
            assert other.num_copied_bytes == 4 * LAYOUT.token_nbytes
            left, right = [*PROMPT, *[1] * 30], [*PROMPT, *[2] * 30]
            fill(seq, left)
            fill(other, right)
            assert holds(seq, left, 130)
            assert holds(other, right, 130)
            seq.commit(left)
            other.commit(right)
            assert holds(seq, left, 130)
            assert holds(other, right, 130)
        assert holds(seq, left, 130)
    assert held(client) == (0, 0)


def test_a_fork_of_tokens_nobody_named_copies_them(cache: kvd_client.Cache) -> None:
    with cache.allocate_sequence(40, 80) as seq:
        fill(seq, PROMPT, 40)
        with seq.fork() as other:
            assert other.num_copied_bytes == 40 * LAYOUT.token_nbytes
            fill(seq, PROMPT, 50)
            assert holds(other, PROMPT, 40)
            other.add_tokens(PROMPT[:40])
            assert other.commit() == 32
    assert cache.match(PROMPT) == 32


def test_a_fork_in_the_middle_of_a_step_keeps_every_layers_own_length(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT, 20)
        seq.append(0, *keys_values(0, PROMPT, 20, 30))
        with seq.fork() as other:
            assert [other.num_tokens_in(layer) for layer in range(3)] == [30, 20, 20]
            fill(other, PROMPT)
            assert holds(other, PROMPT, 100)


def test_allocate_is_all_or_nothing(cache: kvd_client.Cache, client: kvd_client.Client) -> None:
    whole = 64 * (1 << 20) // LAYOUT.block_nbytes * LAYOUT.block_tokens
    with pytest.raises(OutOfBlocks):
        cache.allocate_sequence(whole * 2)
    assert held(client) == (0, 0)
    with cache.allocate_sequence(1000) as seq:
        assert (seq.num_tokens, seq.token_ids, seq.capacity_tokens) == (0, [], 1000)
        view = seq.array(0, 1000)
        assert view.shape == (1000, 3, 2, 2, 64)
        view.fill_(3)
        seq.advance(1000)
        assert bool((seq.layer(2)[1] == 3).all())
        with pytest.raises(SequenceTooLong):
            seq.advance(1)


def test_room_ahead_gives_way_when_blocks_are_short(cache: kvd_client.Cache, client: kvd_client.Client) -> None:
    num_blocks = (4 << 20) // LAYOUT.block_nbytes * 16
    with cache.allocate_sequence((num_blocks - 7) * 16), cache.sequence(PROMPT) as seq:
        assert seq.capacity_tokens == 7 * 16
        fill(seq, [*PROMPT, *[1] * 12])
        with pytest.raises(OutOfBlocks):
            fill(seq, [*PROMPT, *[1] * 13])
        assert holds(seq, [*PROMPT, *[1] * 12], 112)
    assert held(client) == (0, 0)


@host_only("the CPU cannot touch bytes on a card")
def test_bytes_and_array_agree(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        for start, stop in ((0, None), (3, 77), (50, 50)):
            array = seq.array(start, stop)
            assert bytes(seq.buffer(start, stop)) == array.contiguous().view(torch.uint8).numpy().tobytes()
        for start, stop in ((-1, 3), (5, 4), (0, 10_000)):
            with pytest.raises(InvalidRequest):
                seq.array(start, stop)


@host_only("the CPU cannot touch bytes on a card")
def test_a_writer_without_torch_uses_bytes(cache: kvd_client.Cache) -> None:
    with cache.sequence([1] * 16) as seq:
        seq.buffer(0, 16)[:] = bytes(range(256)) * (LAYOUT.block_nbytes // 256)
        seq.advance(16)
        assert seq.commit() == 16
    with cache.sequence([1] * 17) as seq:
        assert bytes(seq.buffer()) == bytes(range(256)) * (LAYOUT.block_nbytes // 256)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_every_dtype_of_a_layout_is_a_torch_dtype(client: kvd_client.Client, dtype: str) -> None:
    layout = KVLayout.fit(num_layers=2, num_kv_heads=2, head_dim=32, dtype=dtype)
    cache = client.cache(model=MODEL, layout=layout)
    num_tokens = layout.block_tokens * 2
    keys = (torch.arange(2 * num_tokens * 32) % 7).view(2, num_tokens, 32).to(getattr(torch, dtype))
    with cache.sequence([1] * num_tokens) as seq:
        for layer in range(2):
            seq.append(layer, keys, keys)
        seq.commit()
    with cache.sequence([1] * (num_tokens + 1)) as seq:
        found, _ = seq.layer(1)
        assert found.dtype == getattr(torch, dtype)
        assert torch.equal(found.float(), keys.float())


def test_a_layer_at_a_time_is_computed_once(cache: kvd_client.Cache) -> None:
    asked: list[tuple[int, int, int]] = []

    def compute(layer: int):  # type: ignore[no-untyped-def]
        def compute_layer(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append((layer, start, stop))
            return keys_values(layer, PROMPT, start, stop)

        return compute_layer

    for _ in range(2):
        with cache.sequence(PROMPT) as seq:
            for layer in range(3):
                keys, _values = seq.get_or_compute(layer, compute(layer))
                assert torch.equal(keys, keys_values(layer, PROMPT, 0, 100)[0])
            seq.get_or_compute(0, compute(0))
    assert asked == [(layer, start, 100) for start in (0, 96) for layer in range(3)]


def test_a_failed_computation_leaves_nothing(cache: kvd_client.Cache, client: kvd_client.Client) -> None:
    def fail(_seq: kvd_client.Sequence) -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        cache.get_or_compute(PROMPT, fail)
    with pytest.raises(InvalidRequest, match="100 tokens are named but 0 are written"):
        cache.get_or_compute(PROMPT, lambda _seq: None)
    assert held(client) == (0, 0)
    assert cache.match(PROMPT) == 0


def test_use_after_close_is_a_typed_error(cache: kvd_client.Cache, client: kvd_client.Client) -> None:
    seq = cache.sequence(PROMPT)
    fill(seq, PROMPT)
    seq.close()
    seq.close()
    for use in (
        lambda: seq.layer(0),
        seq.array,
        seq.buffer,
        lambda: seq.append(0, *keys_values(0, PROMPT, 0, 1)),
        lambda: seq.extend(1),
        seq.commit,
        lambda: seq.truncate(0),
        seq.fork,
        lambda: seq.add_tokens([1]),
        lambda: seq.advance(0),
    ):
        with pytest.raises(ClientClosed):
            use()
    open_one = cache.sequence(PROMPT)
    client.close()
    client.close()
    assert open_one.closed
    for use in (lambda: cache.sequence(PROMPT), lambda: cache.match(PROMPT), client.status, lambda: open_one.layer(0)):
        with pytest.raises(ClientClosed):
            use()


def test_a_layout_of_broken_pages_never_reaches_the_daemon(client: kvd_client.Client) -> None:
    with pytest.raises(InvalidLayout, match="use block_tokens="):
        client.cache(model=MODEL, layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_tokens=15))
