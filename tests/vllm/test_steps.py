"""Both halves of the connector, driven step by step as vLLM drives them, over a real daemon and without an engine."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import kvd_client
from kvd_client.engines.vllm.identity import Names
from kvd_client.engines.vllm.metadata import Load, Save, StepMetadata, WorkerReport
from kvd_client.engines.vllm.names import Variant
from kvd_client.engines.vllm.scheduler import ANSWER_S, SchedulerSide
from kvd_client.engines.vllm.settings import Settings
from kvd_client.engines.vllm.worker import WorkerSide
from tests.support.clock import FakeClock
from tests.support.daemon import running_daemon
from tests.support.wait import eventually
from tests.vllm import configs
from tests.vllm.configs import BLOCK_SIZE, LAYERS

TOKENS = list(range(1000, 1400))
STEP_S = 0.5


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with running_daemon(
        tmp_path_factory.mktemp("steps"), budget="32MiB", segment="1MiB", memory={"checksums": True}
    ) as daemon:
        yield daemon


@pytest.fixture
def names(request):
    """Of a model that no other test has."""
    return Names(configs.engine("none"), configs.kv_cache(), model=f"{request.node.name}@1")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def scheduler(daemon, names, clock):
    side = SchedulerSide(names, Settings(runtime_dir=str(daemon.folder)), block_size=BLOCK_SIZE, clock=clock)
    yield side
    side.close()


@pytest.fixture
def make_worker(daemon, names, clock):
    made = []

    def make(rank: int = 0) -> WorkerSide:
        settings = Settings(runtime_dir=str(daemon.folder), timeout_s=30.0)
        side = WorkerSide(names, settings, rank=rank, layers=LAYERS, block_size=BLOCK_SIZE, clock=clock)
        made.append(side)
        return side

    yield make
    for side in made:
        side.close()


def caches(fill: float, num_blocks: int = 16):
    return {name: torch.full((num_blocks, 2, BLOCK_SIZE, 64), fill, dtype=torch.bfloat16) for name in LAYERS}


def request(num_tokens: int, *, num_computed: int = 0, **fields):
    plain = {
        "request_id": "one",
        "num_tokens": num_tokens,
        "num_computed_tokens": num_computed,
        "all_token_ids": TOKENS[:num_tokens],
        "num_preemptions": 0,
        "skip_reading_prefix_cache": False,
        "prompt_embeds": None,
        "prompt_token_ids": TOKENS[:num_tokens],
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**(plain | fields))


def step(scheduled: dict[str, int], *, preempted=()):
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=set(preempted),
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _name: (list(range(16)),)),
    )


def saves(scheduler: SchedulerSide, scheduled: int, **more) -> list[tuple[int, list[int], int]]:
    """(tokens, blocks, those that this step computes) of each save of a step."""
    metadata = scheduler.metadata(step({"one": scheduled}, **more))
    return [(len(save.tokens), save.blocks, save.num_prefilled) for save in metadata.saves]


def report(*, received=(), done=(), resets=()):
    worker = WorkerReport(Counter(done), Counter(resets))
    return SimpleNamespace(finished_recving=set(received), kv_connector_worker_meta=worker)


def store(make_worker, num_tokens: int, fill: float = 1.0) -> None:
    """Another engine has computed these."""
    worker = make_worker()
    worker.register(caches(fill))
    worker.after_step(StepMetadata(saves=[save(num_tokens)], num_tokens=num_tokens))
    worker.close()
    assert worker.num_tokens_saved == num_tokens


def save(num_tokens: int, **fields) -> Save:
    return Save(1, "one", Variant(), TOKENS[:num_tokens], list(range(num_tokens // BLOCK_SIZE)), **fields)


def test_only_blocks_that_are_full_are_saved_and_once(scheduler):  # case A7
    one = request(150)
    scheduler.allocated(one, list(range(5)), 0)
    assert saves(scheduler, 100) == [(96, [0, 1, 2], 100)]
    one.num_computed_tokens = 100
    assert saves(scheduler, 27) == []
    one.num_computed_tokens = 127
    assert saves(scheduler, 1) == [(128, [0, 1, 2, 3], 0)], "too few tokens to tell how long a prefill takes"


def test_tokens_that_are_sampled_and_not_known_yet_are_not_saved(scheduler):
    scheduler.allocated(request(100, num_computed=100), list(range(5)), 0)
    assert saves(scheduler, 60) == [(96, [0, 1, 2], 0)]


@pytest.mark.parametrize(("num_computed", "num_tokens", "saved"), [(128, 129, [128]), (128, 128, [96]), (20, 21, [])])
def test_the_last_token_was_sampled_and_not_computed(scheduler, num_computed, num_tokens, saved):
    one = request(num_tokens, num_computed=num_computed)
    scheduler.allocated(one, list(range(5)), 0)
    assert scheduler.finished(one, list(range(5))) is bool(saved)
    metadata = scheduler.metadata(step({}))
    assert [len(save.tokens) for save in metadata.saves] == saved
    assert metadata.finishing == ["one"] * bool(saved)


def test_a_request_of_embeddings_is_neither_looked_for_nor_saved(scheduler):
    one = request(200, prompt_embeds=object())
    assert scheduler.num_matched(one, 0) == 0
    scheduler.allocated(one, list(range(7)), 0)
    assert saves(scheduler, 200) == []
    assert not scheduler.faults


def test_what_others_have_is_found_but_for_the_last_token(scheduler, make_worker):  # case A7
    store(make_worker, 128)
    for number, (num_tokens, num_computed, found) in enumerate(
        [(128, 0, 96), (129, 0, 128), (200, 0, 128), (200, 32, 96), (200, 128, 0), (300, 160, 0), (32, 0, 0)]
    ):
        assert scheduler.num_matched(request(num_tokens, request_id=str(number)), num_computed) == found
    assert scheduler.num_matched(request(200, request_id="told not to", skip_reading_prefix_cache=True), 0) == 0
    assert scheduler.num_matched(request(200, request_id="salted", cache_salt="a"), 0) == 0


@pytest.mark.parametrize("num_resident", [0, 64])
def test_what_only_a_tier_below_has_is_found_too(names, tmp_path, num_resident):  # case A7
    with running_daemon(tmp_path, budget="32MiB", segment="1MiB", tiers={"host": {"budget": 4 << 20}}) as daemon:
        settings = Settings(runtime_dir=str(daemon.folder))
        worker = WorkerSide(names, settings, rank=0, layers=LAYERS, block_size=BLOCK_SIZE)
        scheduler = SchedulerSide(names, settings, block_size=BLOCK_SIZE)
        worker.register(caches(1.0))
        worker.after_step(StepMetadata(saves=[save(128)], num_tokens=128))
        with contextlib.closing(scheduler), contextlib.closing(worker), kvd_client.connect(daemon.folder) as client:
            eventually(lambda: worker.num_tokens_saved == 128)
            eventually(lambda: client.spill() == 0)
            client.flush(model=names.model, tier="pool")
            if num_resident:
                worker.after_step(StepMetadata(saves=[save(num_resident)], num_tokens=num_resident))
                eventually(lambda: worker.num_tokens_saved == 128 + num_resident)
            assert scheduler.num_matched(request(200), 0) == 128
            assert scheduler.num_matched(request(200, request_id="two"), 32) == 96


def test_the_daemon_is_not_asked_where_it_cannot_help(names, tmp_path):
    settings = Settings(runtime_dir=str(tmp_path))
    scheduler = SchedulerSide(names, settings, block_size=BLOCK_SIZE)
    for number, (num_tokens, num_computed) in enumerate([(32, 0), (128, 96), (150, 128)]):
        assert scheduler.num_matched(request(num_tokens, request_id=str(number)), num_computed) == 0
    assert not scheduler.faults
    assert scheduler.num_matched(request(150), 96) == 0
    assert sum(scheduler.faults.values()) == 1


def test_an_answer_is_asked_for_again_when_it_is_old(scheduler, make_worker, clock):
    assert scheduler.num_matched(request(200), 0) == 0
    store(make_worker, 128)
    assert scheduler.num_matched(request(200), 0) == 0
    clock.advance(ANSWER_S + 0.1)
    assert scheduler.num_matched(request(200), 0) == 128


def test_a_load_is_tried_once_until_the_request_is_preempted(scheduler, make_worker):
    store(make_worker, 128)
    one = request(200)
    assert scheduler.num_matched(one, 32) == 96
    scheduler.allocated(one, [5, 6, 7, 8, 9, 10, 11], 96)
    (load,) = scheduler.metadata(step({})).loads
    assert (load.tokens, load.first, load.blocks) == (TOKENS[:128], 32, [6, 7, 8])
    assert scheduler.num_matched(one, 32) == 0
    one.num_preemptions = 1
    assert scheduler.num_matched(one, 32) == 96


def test_what_came_from_kvd_is_not_saved(scheduler, make_worker):
    store(make_worker, 128)
    one = request(200)
    scheduler.num_matched(one, 0)
    scheduler.allocated(one, list(range(7)), 128)
    one.num_computed_tokens = 128
    scheduler.heard(report(received=["one"]))
    assert saves(scheduler, 20) == []
    one.num_computed_tokens = 199
    assert scheduler.finished(one, list(range(7))) is True
    assert [len(save.tokens) for save in scheduler.metadata(step({})).saves] == [192]


def test_what_did_not_come_from_kvd_is_saved(scheduler, make_worker):
    store(make_worker, 128)
    one = request(200)
    scheduler.num_matched(one, 0)
    scheduler.allocated(one, list(range(7)), 128)
    one.num_computed_tokens = 64  # vLLM has cut it to what arrived
    scheduler.heard(report(received=["one"]))
    assert saves(scheduler, 60) == [(96, [0, 1, 2], 0)]


def test_a_request_that_ends_while_it_is_loaded_saves_nothing(scheduler, make_worker):
    store(make_worker, 128)
    one = request(200)
    scheduler.num_matched(one, 0)
    scheduler.allocated(one, list(range(7)), 64)
    one.num_computed_tokens = 199
    assert scheduler.finished(one, list(range(7))) is False
    assert scheduler.metadata(step({})).saves == []


def test_blocks_that_were_taken_back_are_saved_from_their_new_places(scheduler):
    one = request(200)
    scheduler.allocated(one, list(range(7)), 0)
    assert saves(scheduler, 100) == [(96, [0, 1, 2], 100)]
    metadata = scheduler.metadata(step({}, preempted=["one"]))
    assert metadata.preempted == ["one"]
    assert saves(scheduler, 100) == [(96, [0, 1, 2], 100)]


def test_a_request_that_lost_its_blocks_keeps_none_of_them(scheduler):
    scheduler.allocated(request(200), list(range(7)), 0)
    assert saves(scheduler, 100) == [(96, [0, 1, 2], 100)]
    scheduler.metadata(step({}, preempted=["one"]))
    assert scheduler.finished(request(21, num_computed=20), []) is False


def test_blocks_of_vllm_that_are_no_whole_pages_are_saved_by_several(daemon):
    cache = configs.kv_cache(layers=["one"], num_kv_heads=1, block_size=16)
    names = Names(configs.engine("none"), cache, model="small@1")
    scheduler = SchedulerSide(names, Settings(runtime_dir=str(daemon.folder)), block_size=16)
    scheduler.allocated(request(200), list(range(13)), 0)
    assert saves(scheduler, 63) == [(32, [0, 1], 0)]
    scheduler.close()


def test_blocks_stay_until_every_rank_is_done_with_them(daemon, names):
    names.num_ranks = 2
    scheduler = SchedulerSide(names, Settings(runtime_dir=str(daemon.folder)), block_size=BLOCK_SIZE)
    one = request(200)
    scheduler.allocated(one, list(range(7)), 0)
    (saved,) = scheduler.metadata(step({"one": 100})).saves
    scheduler.heard(report(done=[saved.number]))
    assert scheduler._tracked["one"].outstanding == {saved.number}
    scheduler.heard(report(done=[saved.number]))
    assert not scheduler._tracked["one"].outstanding
    scheduler.close()


def test_nothing_is_found_from_a_reset_on_until_every_worker_has_carried_it_out(
    scheduler, make_worker, names
):  # case A9
    names.num_ranks = 2
    store(make_worker, 128)
    assert scheduler.num_matched(request(200), 0) == 128
    assert scheduler.reset()
    assert scheduler.metadata(step({})).reset == 1
    store(make_worker, 128)
    for _ in range(2):
        assert scheduler.num_matched(request(200, request_id="another"), 0) == 0
        scheduler.heard(report(resets=[1]))
    assert scheduler.num_matched(request(200, request_id="another"), 0) == 128


def test_an_answer_from_before_a_reset_is_worth_nothing(scheduler, make_worker):  # case A9
    store(make_worker, 128)
    assert scheduler.num_matched(request(200), 0) == 128
    assert scheduler.reset()
    scheduler.heard(report(resets=[1]))
    assert scheduler.num_matched(request(200), 0) == 0


def test_a_worker_forgets_what_was_stored_before_a_reset_and_says_so(scheduler, make_worker):  # case A9
    store(make_worker, 128)
    worker = make_worker()
    worker.register(caches(1.0))
    worker.before_step(StepMetadata(reset=1))
    worker.close()
    assert worker.take_report().resets == Counter([1])
    assert worker.take_report() is None
    assert scheduler.num_matched(request(200), 0) == 0


def test_what_one_worker_saves_another_loads(make_worker):  # case E4
    store(make_worker, 128, fill=3.0)
    reader, theirs = make_worker(), caches(0.0)
    reader.register(theirs)
    reader.start_loads(StepMetadata(loads=[Load("one", Variant(), TOKENS[:128], 32, [9, 2, 3])]))
    reader.after_step(StepMetadata())  # waits a moment: nothing is computed
    reader._load_thread.submit(lambda: None).result(30)
    assert reader.take_finished() == (set(), {"one"})
    assert reader.take_failed_blocks() == set()
    for cache in theirs.values():
        assert {number for number in range(16) if cache[number].eq(3.0).all()} == {2, 3, 9}
        assert not cache[[0, 1, 4, 5]].any()


def test_blocks_that_are_not_there_any_more_are_left_to_vllm(make_worker):
    store(make_worker, 64)
    reader = make_worker()
    reader.register(caches(0.0))
    reader.start_loads(StepMetadata(loads=[Load("one", Variant(), TOKENS[:128], 32, [9, 2, 3])]))
    reader._load_thread.submit(lambda: None).result(30)
    assert reader.take_finished() == (set(), {"one"})
    assert reader.take_failed_blocks() == {2, 3}
    assert (reader.num_tokens_loaded, reader.faults) == (32, Counter({"load evicted": 1}))


def test_each_rank_has_blocks_of_its_own(make_worker, names):
    names.num_ranks = 2
    writer = make_worker(rank=1)
    writer.register(caches(1.0))
    writer.after_step(StepMetadata(saves=[save(128)], num_tokens=128))
    writer.close()
    for rank, num_loaded in ((0, 0), (1, 128)):
        reader = make_worker(rank=rank)
        reader.register(caches(0.0))
        reader.start_loads(StepMetadata(loads=[Load("one", Variant(), TOKENS[:128], 0, [0, 1, 2, 3])]))
        reader.close()
        assert reader.num_tokens_loaded == num_loaded


def test_bytes_that_differ_are_left_to_vllm_and_forgotten(make_worker, names, scheduler):
    worker = make_worker()
    worker.register(caches(1.0))
    worker.after_step(StepMetadata(saves=[save(128)], num_tokens=128))
    worker._saves._thread.submit(lambda: None).result(30)
    cache = worker._saving.cache(worker._saving._connected(), names.namespace(0, Variant()))
    with cache.sequence(TOKENS[:128], 128, attach_all=True) as sequence:
        (run,) = sequence._core._cache.memory.runs([sequence._core.block_at(1)], writable=True)
        os.pwrite(run.fd, b"\xff", run.offset + 1000)
    worker.start_loads(StepMetadata(loads=[Load("one", Variant(), TOKENS[:128], 0, [0, 1, 2, 3])]))
    worker._load_thread.submit(lambda: None).result(30)
    worker.take_finished()
    assert worker.take_failed_blocks() == {0, 1, 2, 3}
    assert worker.faults == Counter({"load corrupt-block": 1})
    assert scheduler.num_matched(request(200), 0) == 32, "it would be found, and refused, again and again"


@pytest.mark.parametrize("taken_back", [{"preempted": ["one"]}, {"reset": 1}], ids=str)
def test_what_waits_to_be_saved_is_not_read_once_vllm_takes_it_back(make_worker, taken_back):
    worker, may_go_on = make_worker(), threading.Event()
    worker.register(caches(1.0))
    worker._saves.submit(may_go_on.wait)
    worker.after_step(StepMetadata(saves=[save(128)], num_tokens=128))
    worker.before_step(StepMetadata(**taken_back))
    may_go_on.set()
    worker.close()
    assert worker.num_tokens_saved == 0
    assert worker.take_report().done == Counter([1])


def test_a_cache_of_another_arrangement_copies_nothing(make_worker):
    worker = make_worker()
    worker.register({name: cache.transpose(1, 2) for name, cache in caches(1.0).items()})
    worker.after_step(StepMetadata(saves=[save(128)], num_tokens=128))
    worker.start_loads(StepMetadata(loads=[Load("one", Variant(), TOKENS[:128], 0, [0, 1, 2, 3])]))
    worker.close()
    worker.take_finished()
    assert worker.take_failed_blocks() == {0, 1, 2, 3}
    assert (worker.num_tokens_saved, worker.num_tokens_loaded) == (0, 0)


def reported(daemon, names) -> tuple[int, float, int]:
    """(tokens and seconds of computing that the daemon was told of, tokens that it counts as saved)."""
    with kvd_client.connect(daemon.folder) as client:
        status = client.status()
    (namespace,) = [each for each in status.namespaces if each.model == names.model]
    return namespace.computed_tokens, namespace.computed_s, namespace.counters["hits"] * BLOCK_SIZE


def prefill(worker: WorkerSide, clock: FakeClock, *saves: Save, num_tokens: int) -> None:
    worker.begin_step()
    clock.advance(STEP_S)
    worker.after_step(StepMetadata(saves=list(saves), num_tokens=num_tokens))


def test_the_daemon_hears_how_long_a_prefill_took(daemon, names, make_worker, clock):
    worker = make_worker()
    worker.register(caches(1.0))
    # Half of the step's tokens are another request's.
    prefill(worker, clock, save(96, num_prefilled=100), num_tokens=200)
    worker.close()
    assert reported(daemon, names) == (100, STEP_S / 2, 0)


def test_what_a_save_finds_of_its_own_request_counts_as_nothing_saved(daemon, names, make_worker):
    store(make_worker, 64)
    worker = make_worker()
    worker.register(caches(1.0))
    worker.after_step(StepMetadata(saves=[save(128)], num_tokens=64))
    worker.close()
    assert worker.num_tokens_saved == 64
    assert reported(daemon, names) == (0, 0.0, 0)


def test_of_ranks_that_compute_at_the_same_time_one_says_how_long_it_took(daemon, names, make_worker, clock):
    names.num_ranks = 2
    worker = make_worker(rank=1)
    worker.register(caches(1.0))
    prefill(worker, clock, save(128, num_prefilled=128), num_tokens=128)
    worker.close()
    assert reported(daemon, names) == (0, 0.0, 0)


def test_a_save_that_takes_anothers_place_takes_over_what_was_computed_for_it():
    later = save(128, num_prefilled=64, prefill_s=0.5).after(save(64, num_prefilled=70, prefill_s=0.25))
    assert (len(later.tokens), later.num_prefilled, later.prefill_s) == (128, 134, 0.75)
