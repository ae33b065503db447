"""Parts of the connector by themselves: copies, the queue of saves, the line to the daemon, what names a request."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvd_client
from kvd.errors import ConfigError, EngineUnsupported
from kvd.layout import KVLayout
from kvd_client.engines.vllm.daemon import PAUSE_S, Daemon
from kvd_client.engines.vllm.metadata import Save, WorkerReport
from kvd_client.engines.vllm.names import Variant, Variants
from kvd_client.engines.vllm.saves import Saves
from kvd_client.engines.vllm.settings import Settings
from kvd_client.engines.vllm.slabs import Slabs
from tests.support.clock import FakeClock
from tests.support.daemon import running_daemon
from tests.vllm import models

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=32)
LAYERS = ["first", "second", "third"]
BOUND_S = 30.0


def caches(num_blocks: int = 10) -> dict[str, torch.Tensor]:
    """Slices of one allocation, as vLLM's are."""
    whole = torch.arange(3 * num_blocks * 2 * 32 * 64).to(torch.float32).to(torch.bfloat16)
    layers = whole.view(3, num_blocks, 2, 32, 64)
    return {name: layers[number] for number, name in enumerate(LAYERS)}


def test_blocks_come_back_as_they_were_into_other_places():
    ours, theirs = caches(), {name: torch.zeros_like(cache) for name, cache in caches().items()}
    out, back = Slabs(LAYOUT, 32, LAYERS, ours), Slabs(LAYOUT, 32, LAYERS, theirs)
    memory = memoryview(bytearray(5 * out.block_nbytes))
    out.copy_out([7, 2, 3, 4, 0], memory)
    back.copy_in([0, 1, 2, 9, 5], memory)
    for name in LAYERS:
        assert torch.equal(theirs[name][[0, 1, 2, 9, 5]], ours[name][[7, 2, 3, 4, 0]])
        assert not theirs[name][[3, 4, 6, 7, 8]].any()


def test_a_block_in_kvd_is_its_layers_one_after_the_other():
    cache = caches()
    slabs = Slabs(LAYOUT, 32, LAYERS, cache)
    memory = memoryview(bytearray(slabs.block_nbytes))
    slabs.copy_out([6], memory)
    expected = torch.stack([cache[name][6] for name in LAYERS]).view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(np.frombuffer(memory, np.uint8), expected)


@pytest.mark.parametrize("blocks", [[10], [9, 10], [-1]])
def test_a_block_outside_the_cache_is_refused(blocks):
    slabs = Slabs(LAYOUT, 32, LAYERS, caches())
    with pytest.raises(EngineUnsupported, match="a cache of 10"):
        slabs.copy_out(blocks, memoryview(bytearray(len(blocks) * slabs.block_nbytes)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda cache: cache.to(torch.float16),
        lambda cache: cache.transpose(1, 2),
        lambda cache: cache[:, :, :16],
        lambda cache: cache.transpose(2, 3).contiguous().transpose(2, 3),
        lambda cache: cache.to("meta"),
    ],
    ids=["dtype", "heads inside", "block size", "scattered", "device"],
)
def test_an_unexpected_arrangement_is_refused(wrong):
    found = caches()
    found["second"] = wrong(found["second"])
    with pytest.raises(EngineUnsupported, match="second"):
        Slabs(LAYOUT, 32, LAYERS, found)


class Store:
    """Stands where a save would ask the daemon: stops before its copy, and in it, until it is let go."""

    def __init__(self) -> None:
        self.may_begin, self.may_end = threading.Event(), threading.Event()
        self.has_begun, self.is_copying = threading.Event(), threading.Event()
        self.copied: list[int] = []
        self.num_prefilled = 0
        self.saves: Saves | None = None

    def __call__(self, save, may_copy):
        self.has_begun.set()
        assert self.may_begin.wait(BOUND_S)
        if may_copy():
            self.is_copying.set()
            assert self.may_end.wait(BOUND_S)
            self.copied.append(save.number)
            self.num_prefilled += save.num_prefilled
            self.saves.copied()


@pytest.fixture
def store():
    store = Store()
    store.saves = Saves(store, changed=threading.Condition(), max_pending=2)
    yield store
    store.may_begin.set()
    store.may_end.set()
    store.saves.close()


def save(number: int, request: str) -> Save:
    return Save(number, request, Variant(), [1] * 32 * number, list(range(number)), num_prefilled=10**number)


def test_a_later_save_of_a_request_takes_the_place_of_one_that_waits(store):
    for number, request in ((1, "a"), (2, "b"), (3, "b")):
        store.saves.put(save(number, request))
        assert store.has_begun.wait(BOUND_S)
    store.may_begin.set()
    store.may_end.set()
    store.saves.close()
    assert store.copied == [1, 3]
    assert store.num_prefilled == 1110, "what was computed for the one that it replaced is told with it"
    assert store.saves.take_done() == Counter([1, 2, 3])


def test_a_save_that_has_not_begun_to_copy_never_does_once_its_blocks_are_taken_back(store):
    store.saves.put(save(1, "a"))
    assert store.has_begun.wait(BOUND_S)
    store.saves.put(save(2, "b"))
    store.saves.abandon(["a", "b"])
    store.may_begin.set()
    store.saves.close()
    assert store.copied == []
    assert store.saves.take_done() == Counter([1, 2])


def test_a_copy_that_runs_is_waited_for_before_its_blocks_change_hands(store):
    store.saves.put(save(1, "a"))
    store.may_begin.set()
    assert store.is_copying.wait(BOUND_S)
    seen: list[list[int]] = []

    def abandon() -> None:
        store.saves.abandon(["a"])
        seen.append(list(store.copied))

    thread = threading.Thread(target=abandon)
    thread.start()
    store.may_end.set()
    thread.join(BOUND_S)
    assert seen == [[1]]


def test_a_queue_that_is_full_drops_what_comes_and_says_so(store):
    for number, request in enumerate("abcd", start=1):
        store.saves.put(save(number, request))
        assert store.has_begun.wait(BOUND_S)
    store.may_begin.set()
    store.may_end.set()
    store.saves.close()
    assert (store.copied, store.saves.num_dropped) == ([1, 2, 3], 1)
    assert store.saves.take_done() == Counter([1, 2, 3, 4])


def test_a_daemon_that_is_not_there_is_left_alone_for_a_while(tmp_path, caplog):
    clock = FakeClock()
    line = Daemon(str(tmp_path / "run"), label="test", timeout_s=5, clock=clock)
    for _ in range(3):
        assert line.ask("match", lambda client: 1) is None
    assert line.faults == Counter({"match paused": 2, "match daemon-unavailable": 1})
    assert [record.getMessage().count("match failed") for record in caplog.records] == [1]
    with running_daemon(tmp_path):
        assert line.ask("match", lambda client: 1) is None
        clock.advance(PAUSE_S)
        assert line.ask("match", lambda client: client.session_id) is not None
        line.close()
        assert line.ask("match", lambda client: 1) is None


def test_more_salts_than_a_session_may_hold(tmp_path):
    with running_daemon(tmp_path) as daemon:
        line = Daemon(str(daemon.folder), label="test", timeout_s=5)
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
        for number in range(300):
            namespace = kvd_client.Namespace(model="m@1", layout=layout, salt=str(number))
            assert line.ask("match", lambda client, one=namespace: line.cache(client, one).match([1] * 20)) == 0
        assert not line.faults
        line.close()


def request(**fields):
    plain = {
        "prompt_embeds": None,
        "prompt_token_ids": [1],
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**(plain | fields))


def picture(name: str, offset: int = 3):
    position = SimpleNamespace(offset=offset, length=8)
    return SimpleNamespace(modality="image", identifier=name, mm_hash=name, mm_position=position)


def lora(number: int, folder, *, load_inplace: bool = False):
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace)


def test_pictures_their_places_and_salts_make_variants_of_their_own():  # case A3
    of = Variants().of
    requests = [
        request(),
        request(cache_salt="a"),
        request(mm_features=[picture("a")]),
        request(mm_features=[picture("b")]),
        request(mm_features=[picture("a", offset=4)]),
        request(mm_features=[picture("a"), picture("b")]),
        request(mm_features=[picture("a")], cache_salt="a"),
    ]
    assert len({of(one) for one in requests}) == len(requests)
    assert of(requests[2]) == Variants().of(request(mm_features=[picture("a")]))


def test_embeddings_in_the_place_of_tokens_are_not_shared():
    assert Variants().of(request(prompt_embeds=object())) is None
    assert Variants().of(request(prompt_token_ids=None)) is None


def test_an_adapter_whose_files_change_while_it_is_in_use_is_shared_no_more(tmp_path):  # case A5
    variants = Variants()
    folder = models.adapter(tmp_path / "one", seed=1)
    first = variants.of(request(lora_request=lora(1, folder)))
    assert first is not None
    assert first.adapter
    assert variants.of(request(lora_request=lora(1, folder))) == first
    other = models.adapter(tmp_path / "two", seed=2)
    (other / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")
    for _ in range(2):
        assert variants.of(request(lora_request=lora(1, folder))) is None
    # Under another number vLLM loads it anew.
    changed = variants.of(request(lora_request=lora(2, folder)))
    assert changed not in {None, first}


def test_an_adapter_that_is_no_folder_or_is_exchanged_in_place_is_not_shared(tmp_path):
    folder = models.adapter(tmp_path / "one", seed=1)
    assert Variants().of(request(lora_request=lora(1, "somebody/adapter"))) is None
    assert Variants().of(request(lora_request=lora(1, folder, load_inplace=True))) is None


def test_reports_of_several_ranks_add_up():
    one = WorkerReport(Counter([1, 2]), Counter([1]))
    both = one.aggregate(WorkerReport(Counter([2, 3]), Counter()))
    assert (both.done, both.resets) == (Counter({1: 1, 2: 2, 3: 1}), Counter([1]))


@pytest.mark.parametrize("wrong", [{"runtime_directory": "/run/kvd"}, {"timeout_s": "soon"}])
def test_an_unknown_setting_is_an_error(wrong):
    with pytest.raises(ConfigError):
        Settings.of(wrong)
