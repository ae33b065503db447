"""`ContiguousCache`: what goes in comes out whole, in the layout that was asked for; sharing, resets, limits.

Every test runs on host memory and on a card.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvd_client
from kvd.errors import ClientClosed, InvalidLayout, InvalidRequest, InvalidTokens, OutOfBlocks, SequenceTooLong
from kvd_client.engines.contiguous import ARRANGEMENTS, ContiguousCache
from tests.client.conftest import home  # noqa: F401 - a fixture
from tests.client.homes import empty_the_pool, let_go
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import running_daemon

SIZES: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, "block_tokens": 16}
IDS = list(range(1000, 1100))
Make = Callable[..., ContiguousCache]


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory: pytest.TempPathFactory, home: FakeMachine | None) -> Iterator[Path]:  # noqa: F811
    """Of one daemon for all of these."""
    with running_daemon(tmp_path_factory.mktemp("kvd"), budget="256MiB", segment="4MiB", machine=home) as daemon:
        yield daemon.folder


@pytest.fixture
def empty_pool(client: kvd_client.Client) -> None:
    empty_the_pool(client)


@pytest.fixture
def make(client: kvd_client.Client, salt: str) -> Iterator[Make]:
    made: list[ContiguousCache] = []

    def make(**arguments: Any) -> ContiguousCache:
        defaults = SIZES | {"max_tokens": 200, "layout": "hsd", "model": "test@1", "salt": salt}
        made.append(ContiguousCache(client, **(defaults | arguments)))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
    let_go()


def states(layout: str, start: int, stop: int, layer: int = 0, dtype: torch.dtype = torch.float16) -> Any:
    """Keys and values whose numbers say token, head and place; values are the negative."""
    tokens = torch.arange(start, stop)[None, :, None] % 50 * 20
    keys = (tokens + torch.arange(2)[:, None, None] * 1000 + torch.arange(64) % 20 + layer * 3).to(dtype)
    if layout == "hds":
        keys = keys.transpose(1, 2)
    if layout == "bhsd":
        keys = keys[None]
    return keys, -keys


def fill(cache: ContiguousCache, start: int, stop: int, layout: str = "hsd") -> None:
    for layer in range(SIZES["num_layers"]):
        cache.update(layer, *states(layout, start, stop, layer))


def holds(cache: ContiguousCache, stop: int, layout: str = "hsd") -> bool:
    return all(
        torch.equal(shown, right)
        for layer, pair in enumerate(cache.get_all())
        for shown, right in zip(pair, states(layout, 0, stop, layer), strict=True)
    )


@pytest.mark.usefixtures("empty_pool")
@pytest.mark.parametrize("layout", ARRANGEMENTS)
def test_every_update_returns_the_whole_layer_in_the_layout_asked_for(make: Make, layout: str) -> None:
    cache = make(layout=layout)
    for start, stop in ((0, 40), (40, 41), (41, 41), (41, 130)):
        for layer in range(3):
            shown = cache.update(layer, *states(layout, start, stop, layer))
            for got, right in zip(shown, states(layout, 0, stop, layer), strict=True):
                assert torch.equal(got, right)
            assert torch.equal(cache.get(layer)[0], shown[0])
    assert holds(cache, 130, layout)
    assert cache.num_copied_bytes == 0


@pytest.mark.usefixtures("empty_pool")
def test_what_comes_out_is_a_view(make: Make) -> None:
    cache = make()
    first, _ = cache.update(0, *states("hsd", 0, 10))
    second, _ = cache.update(0, *states("hsd", 10, 20))
    assert first.data_ptr() == second.data_ptr() == cache.get(0)[0].data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float64, "torch.float16"])
def test_the_dtype_is_an_argument(make: Make, dtype: Any) -> None:
    cache = make(dtype=dtype)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    keys, _ = cache.update(0, *states("hsd", 0, 5, dtype=wanted))
    assert keys.dtype is wanted
    right, wrong = (states("hsd", 5, 6, dtype=each)[0] for each in (wanted, torch.int16))
    for keys, values in ((wrong, wrong), (right, wrong), (wrong, right)):
        with pytest.raises(InvalidRequest, match="convert them"):
            cache.update(0, keys, values)
    assert cache.seq_length(0) == 5


@pytest.mark.parametrize("dtype", ["int", torch.int32, "nothing"])
def test_what_is_no_dtype_of_a_cache_is_refused(make: Make, dtype: Any) -> None:
    with pytest.raises((InvalidRequest, InvalidLayout), match=r"dtype"):
        make(dtype=dtype)


@pytest.mark.parametrize("layout", ARRANGEMENTS)
@pytest.mark.parametrize("other", [*ARRANGEMENTS, "more heads", "two rows", "values of other length"])
def test_nothing_is_guessed_from_a_shape(make: Make, layout: str, other: str) -> None:
    cache = make(layout=layout)
    keys, values = states(other if other in ARRANGEMENTS else layout, 0, 5)
    if other == "more heads":
        keys = values = torch.cat([keys, keys], dim=keys.dim() - 3)
    elif other == "two rows":
        keys = values = torch.stack([keys, keys]) if keys.dim() == 3 else torch.cat([keys, keys])
    elif other == "values of other length":
        values = states(layout, 0, 6)[1]
    if other == layout:
        cache.update(0, keys, values)
        return
    with pytest.raises(InvalidRequest, match="must both be"):
        cache.update(0, keys, values)
    assert cache.seq_length() == 0


def test_an_unknown_layout_names_those_there_are(make: Make) -> None:
    with pytest.raises(InvalidRequest, match=r"'hds' for \[heads, dim, seq\]"):
        make(layout="nhd")


def test_overflow_is_typed_and_changes_nothing(make: Make) -> None:
    cache = make(max_tokens=100)
    fill(cache, 0, 90)
    with pytest.raises(SequenceTooLong, match="101 tokens do not fit max_tokens=100"):
        cache.update(1, *states("hsd", 90, 101))
    assert holds(cache, 90)
    fill(cache, 90, 100)
    assert (cache.remaining(), cache.is_full(), cache.is_full(2)) == (0, True, True)
    with pytest.raises(SequenceTooLong):
        cache.update(0, *states("hsd", 100, 101))
    assert holds(cache, 100)


def test_a_full_pool_is_typed_and_changes_nothing(tmp_path: Path, home: FakeMachine | None) -> None:  # noqa: F811
    with (
        running_daemon(tmp_path, budget="4MiB", segment="2MiB", machine=home) as daemon,
        kvd_client.connect(daemon.folder) as client,
        ContiguousCache(client, **SIZES, max_tokens=100_000, layout="hsd") as cache,
    ):
        fill(cache, 0, 50)
        with pytest.raises(OutOfBlocks):
            cache.update(0, *states("hsd", 50, 60_000))
        assert holds(cache, 50)
        fill(cache, 50, 60)
        assert holds(cache, 60)


def test_memory_is_taken_as_it_grows(make: Make, client: kvd_client.Client) -> None:
    """A cache that may hold 2 GiB takes one block at first, and segments only as they are needed."""
    cache = make(max_tokens=1_000_000)
    assert cache.memory_usage().reserved_nbytes == 0
    cache.update(0, *states("hsd", 0, 1))
    assert cache.memory_usage().reserved_nbytes == cache.layout.block_nbytes
    before = client.status().memory.used_nbytes
    fill(make(max_tokens=1_000_000), 0, 5000)
    assert 0 < client.status().memory.used_nbytes - before < 32 << 20


def test_lengths_layer_by_layer(make: Make) -> None:
    cache = make(max_tokens=50)
    cache.update(1, *states("hsd", 0, 20))
    assert [cache.seq_length(layer) for layer in range(3)] == [0, 20, 0]
    assert (cache.seq_length(), cache.remaining(), cache.remaining(0)) == (20, 30, 50)
    assert cache.get(0)[0].shape == (2, 0, 64)
    for layer in (-1, 3):
        for ask in (cache.seq_length, cache.get, cache.reset, cache.remaining, cache.is_full):
            with pytest.raises(InvalidRequest, match="of 3"):
                ask(layer)
        with pytest.raises(InvalidRequest, match="of 3"):
            cache.update(layer, *states("hsd", 0, 1))


def test_memory_usage_and_repr_say_what_is_there(make: Make) -> None:
    cache = make(max_tokens=100)
    fill(cache, 0, 20)
    cache.update(0, *states("hsd", 20, 30))
    usage = cache.memory_usage()
    keys_nbytes = sum(keys.nbytes for keys, _ in cache.get_all())
    assert (usage.keys_nbytes, usage.values_nbytes) == (keys_nbytes, keys_nbytes) == (70 * 2 * 64 * 2,) * 2
    assert (usage.num_slots_used, usage.num_slots, usage.shared_nbytes) == (30, 100, 0)
    assert usage.reserved_nbytes % cache.layout.block_nbytes == 0
    assert usage.reserved_nbytes >= 2 * cache.layout.block_nbytes
    cache.commit(IDS[:20])
    assert cache.memory_usage().shared_nbytes == cache.layout.block_nbytes
    says = "3 layers x 2 heads x 64, float16, [heads, seq, dim], 30 of 100 tokens, 16 shared"
    assert repr(cache) == f"ContiguousCache({says})"


def test_reset_zeroes_what_was_private_and_gives_it_back(make: Make) -> None:
    cache = make()
    fill(cache, 0, 20)
    shown = cache.get_all()
    cache.reset()
    assert not any(each.any() for pair in shown for each in pair)
    assert (cache.seq_length(), cache.memory_usage().reserved_nbytes) == (0, 0)
    fill(cache, 0, 30)
    assert holds(cache, 30)


def test_reset_lets_go_of_shared_blocks_and_leaves_their_bytes(make: Make) -> None:
    cache = make()
    fill(cache, 0, 40)
    cache.commit(IDS[:40])
    shown = cache.get(0)[0]
    cache.reset()
    assert torch.equal(shown[:, :32], states("hsd", 0, 32)[0])
    assert not shown[:, 32:].any()
    assert make().attach(IDS) == 32


def test_one_layer_can_be_reset(make: Make) -> None:
    cache = make()
    fill(cache, 0, 20)
    shown = cache.get(1)[0]
    cache.reset(1)
    assert not shown.any()
    assert [cache.seq_length(layer) for layer in range(3)] == [20, 0, 20]
    cache.update(1, *states("hsd", 0, 20, layer=1))
    assert holds(cache, 20)
    for layer in range(3):
        cache.reset(layer)
    assert cache.memory_usage().reserved_nbytes == 0


@pytest.mark.usefixtures("empty_pool")
def test_one_layer_of_a_shared_sequence_can_be_reset_and_the_others_keep_their_blocks(make: Make) -> None:
    cache = make()
    fill(cache, 0, 40)
    cache.commit(IDS[:40])
    cache.reset(1)
    cache.reset(2)
    assert cache.commit() == 32
    cache.update(1, *states("hsd", 0, 50, layer=7))
    assert torch.equal(cache.get(1)[0], states("hsd", 0, 50, layer=7)[0])
    assert torch.equal(cache.get(0)[0], states("hsd", 0, 40)[0])
    assert cache.get(2)[0].shape[1] == 0
    assert cache.num_copied_bytes == 40 * 2 * 2 * 64 * 2
    other = make()
    assert other.attach(IDS) == 32
    assert torch.equal(other.get(1)[0], states("hsd", 0, 32, layer=1)[0])


@pytest.mark.usefixtures("empty_pool")
def test_a_layer_that_grew_behind_shared_blocks_can_be_reset(make: Make) -> None:
    """What it could be written through shows the shared blocks too, which are not to be written."""
    cache = make()
    fill(cache, 0, 40)
    cache.commit(IDS[:40])
    cache.update(1, *states("hsd", 40, 45, layer=1))
    cache.reset(1)
    cache.update(1, *states("hsd", 0, 20, layer=7))
    assert torch.equal(cache.get(1)[0], states("hsd", 0, 20, layer=7)[0])
    other = make()
    assert other.attach(IDS) == 32
    assert holds(other, 32)


def test_a_layer_that_was_reset_is_not_published(make: Make) -> None:
    cache = make()
    fill(cache, 0, 40)
    assert cache.commit() == 0  # nobody has named the tokens yet
    cache.reset(1)
    assert cache.commit(IDS[:40]) == 0
    assert make().attach(IDS) == 0


@pytest.mark.usefixtures("empty_pool")
def test_what_is_committed_is_attached_by_another(make: Make, home: FakeMachine | None) -> None:  # noqa: F811
    one, two = make(), make(layout="hds", max_tokens=150)
    fill(one, 0, 50)
    assert one.commit(IDS[:50]) == 48
    assert two.attach(IDS[:49]) == 48
    assert holds(two, 48, "hds")
    # On a card what is attached and the room behind it are one tensor after a copy, made once.
    copied_nbytes = 0 if home is None else two.memory_usage().reserved_nbytes
    assert two.num_copied_bytes == copied_nbytes
    for layer in range(3):
        two.update(layer, *states("hds", 48, 70, layer))
    assert holds(two, 70, "hds")
    assert two.num_copied_bytes == copied_nbytes
    assert two.commit(IDS[:70]) == 64
    fill(one, 50, 60)
    assert holds(one, 60)


def test_at_most_all_but_one_token_are_attached(make: Make) -> None:
    cache = make()
    fill(cache, 0, 48)
    cache.commit(IDS[:48])
    assert cache.attach(IDS[:48]) == 32


def test_attach_forgets_what_was_there(make: Make) -> None:
    cache = make()
    fill(cache, 0, 50)
    shown = cache.get(0)[0]
    assert cache.attach(IDS[:50]) == 0
    assert not shown.any()
    assert cache.seq_length() == 0


# case A8
def test_other_ids_than_those_attached_are_refused(make: Make) -> None:
    cache = make()
    fill(cache, 0, 32)
    cache.commit(IDS[:32])
    cache.attach(IDS[:40])
    fill(cache, 32, 40)
    with pytest.raises(InvalidTokens, match="differ at token 3"):
        cache.commit([*IDS[:3], 7, *IDS[4:40]])
    assert cache.commit() == 32


# case A4
@pytest.mark.parametrize(
    "other",
    [{"model": "test@2"}, {"dtype": "bfloat16"}, {"positional": "rope"}, {"adapter": "a"}, {"salt": "another"}],
    ids=lambda each: next(iter(each)),
)
def test_another_model_dtype_position_adapter_or_salt_misses(make: Make, other: dict[str, Any]) -> None:
    cache = make()
    fill(cache, 0, 32)
    cache.commit(IDS[:32])
    assert make(**other).attach(IDS) == 0
    assert make().attach(IDS) == 32


def test_a_cache_without_a_model_shares_nothing(make: Make) -> None:
    cache = make(model="")
    fill(cache, 0, 32)
    for call in (lambda: cache.commit(IDS[:32]), lambda: cache.attach(IDS)):
        with pytest.raises(InvalidRequest, match="name its model"):
            call()
    assert holds(cache, 32)


def test_both_commit_the_same_and_one_block_stays(
    make: Make,
    client: kvd_client.Client,
    home: FakeMachine | None,  # noqa: F811
) -> None:
    one, two = make(), make()
    for cache in (one, two):
        fill(cache, 0, 32)
        assert cache.commit(IDS[:32]) == 32
    assert holds(one, 32)
    assert holds(two, 32)
    me = next(each for each in client.status().clients if each.session == client.session_id)
    assert me.num_references == 4
    if home is None:
        assert two._sequence is not None
        assert not two._sequence._core._own_copies, "no view that it keeps for itself keeps its copy"


def test_history_of_gradients_stays_outside(make: Make) -> None:
    cache = make(dtype="float32")
    keys, values = states("hsd", 0, 5, dtype=torch.float32)
    shown, _ = cache.update(0, keys.requires_grad_(), values)
    assert not shown.requires_grad


def test_a_closed_cache_says_so_and_its_tensors_live(make: Make) -> None:
    cache = make()
    shown, _ = cache.update(0, *states("hsd", 0, 5))
    cache.close()
    cache.close()
    assert torch.equal(shown, states("hsd", 0, 5)[0])
    for call in (lambda: cache.update(0, *states("hsd", 5, 6)), lambda: cache.get(0), cache.reset, cache.commit):
        with pytest.raises(ClientClosed):
            call()
    assert "closed" in repr(cache)


OTHER = """
import sys
import kvd_client
from kvd_client.engines.contiguous import ContiguousCache
from tests.engines.test_contiguous import IDS, SIZES, holds

with kvd_client.connect(sys.argv[1]) as client, ContiguousCache(
    client, **SIZES, max_tokens=200, layout="hsd", model="test@1", salt=sys.argv[2]
) as cache:
    print(cache.attach(IDS), holds(cache, 96), cache.num_copied_bytes, cache.memory_usage().reserved_nbytes)
"""


@pytest.mark.usefixtures("empty_pool")
def test_another_process_attaches_and_copies_on_a_card_alone(
    make: Make,
    runtime_dir: Path,
    salt: str,
    home: FakeMachine | None,  # noqa: F811
) -> None:
    cache = make()
    fill(cache, 0, 100)
    cache.commit(IDS)
    argv = [sys.executable, "-c", OTHER, str(runtime_dir), salt]
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    num_attached, is_right, copied_nbytes, reserved_nbytes = done.stdout.split() or [done.stderr] * 4
    assert (num_attached, is_right) == ("96", "True")
    assert copied_nbytes == ("0" if home is None else reserved_nbytes)
