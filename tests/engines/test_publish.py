"""When blocks become visible to others, and what a generation does without the daemon."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import kvd_client
from kvd.cli.demo.daemon import private_daemon
from kvd.errors import ClientClosed, DaemonRestarted, EngineUnsupported, InvalidRequest, InvalidTokens, OutOfBlocks
from kvd_client.engines.transformers import attach
from tests.engines.adapters import adapted
from tests.engines.tiny import greedy, prompt, tiny_model


def test_blocks_are_published_step_by_step(client: kvd_client.Client, salt: str) -> None:
    model, input_ids = tiny_model(), prompt()
    with attach(client, model, input_ids, salt=salt) as cache, torch.no_grad():
        model(input_ids[:, :50], cache=cache)
        assert cache.sequence.num_sealed_tokens == 48
        model(input_ids[:, 50:64], cache=cache)
        assert cache.sequence.num_sealed_tokens == 64


def test_the_speed_of_a_prefill_is_reported_and_that_of_small_steps_is_not(
    client: kvd_client.Client, salt: str
) -> None:
    model, input_ids = tiny_model(), prompt()

    def computed() -> int:
        digest = cache.sequence._core._cache.digest.hex()
        return next(one.computed_tokens for one in client.status().namespaces if one.digest == digest)

    with attach(client, model, input_ids, salt=salt) as cache, torch.no_grad():
        model(input_ids[:, :80], cache=cache)
        assert computed() == 80
        model(input_ids[:, 80:96], cache=cache)
        assert computed() == 80


def test_nothing_is_published_before_commit_when_told_so(client: kvd_client.Client, salt: str) -> None:
    model, input_ids = tiny_model(), prompt()
    with attach(client, model, input_ids, salt=salt, publish=False) as cache:
        greedy(model, input_ids, cache=cache)
        assert cache.sequence.num_sealed_tokens == 0
        assert cache.commit() == 96
    with attach(client, model, input_ids, salt=salt) as cache:
        assert cache.num_cached_tokens == 96


def test_a_fork_publishes_no_more_than_what_it_was_forked_from(client: kvd_client.Client, salt: str) -> None:
    model, input_ids = tiny_model(), prompt()
    with attach(client, model, input_ids, salt=salt, publish=False) as cache, cache.fork() as fork:
        greedy(model, input_ids, cache=fork)
        assert fork.sequence.num_sealed_tokens == 0


def test_generated_tokens_are_found_too(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    with attach(client, model, prompt(), salt=salt) as cache:
        output = greedy(model, prompt(), 40, cache=cache)
    with attach(client, model, output, salt=salt) as cache:
        assert cache.num_cached_tokens == 128
        assert torch.equal(greedy(model, output, cache=cache), greedy(model, output))


def test_a_materialized_prefix_gives_the_same_tokens(client: kvd_client.Client, salt: str) -> None:
    model = tiny_model()
    for num_cached in (0, 96):
        with attach(client, model, prompt(), salt=salt, materialize=True) as cache:
            assert cache.num_cached_tokens == num_cached
            assert cache.num_copied_bytes == num_cached * cache.sequence.layout.token_nbytes
            assert torch.equal(greedy(model, prompt(), cache=cache), greedy(model, prompt()))


# case A4
# case A5
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (tiny_model, lambda: tiny_model(seed=1)),
        (tiny_model, lambda: tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
        (tiny_model, adapted),
        (adapted, lambda: adapted(scale=0.2)),
    ],
    ids=["weights", "rope", "adapter", "content of an adapter of the same name"],
)
def test_other_weights_rope_or_adapters_miss(client: kvd_client.Client, salt: str, one: Any, two: Any) -> None:
    first, second = one(), two()
    for model, num_cached in ((first, 0), (second, 0), (first, 96), (second, 96)):
        with attach(client, model, prompt(), salt=salt) as cache:
            assert cache.num_cached_tokens == num_cached
            assert torch.equal(greedy(model, prompt(), cache=cache), greedy(model, prompt()))


def test_two_caches_on_one_model_at_once(client: kvd_client.Client, salt: str) -> None:
    model, one, two = tiny_model(), prompt(seed=1), prompt(seed=2)
    with attach(client, model, one, salt=salt) as first, attach(client, model, two, salt=salt, wait_s=0.0) as second:
        assert torch.equal(greedy(model, two, cache=second), greedy(model, two))
        assert torch.equal(greedy(model, one, cache=first), greedy(model, one))
        with pytest.raises(InvalidRequest):
            greedy(model, two, cache=first)


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_inference_mode_and_no_grad_may_take_turns(client: kvd_client.Client, salt: str, first: Any) -> None:
    model, input_ids = tiny_model(), prompt()
    second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    with first():
        cache = attach(client, model, input_ids, salt=salt)
        model(input_ids[:, :40], cache=cache)
    with second():
        model(input_ids[:, 40:70], cache=cache)
    assert torch.equal(greedy(model, input_ids, cache=cache), greedy(model, input_ids))
    cache.close()


@pytest.mark.parametrize("rows", [torch.ones(1, 2, 5, dtype=torch.long), torch.ones(2, 5)])
def test_what_is_no_batch_of_prompts_is_refused(client: kvd_client.Client, rows: torch.Tensor) -> None:
    with pytest.raises(InvalidTokens):
        attach(client, tiny_model(), rows)


def test_a_model_that_is_refused_leaves_nothing(client: kvd_client.Client) -> None:
    with pytest.raises(EngineUnsupported):
        attach(client, tiny_model().train(), prompt())


def test_a_waiting_process_goes_on_after_the_prefill(client: kvd_client.Client, runtime_dir: Any, salt: str) -> None:
    """Single flight: the second one need not wait for the end of the first one's generation."""
    model, input_ids = tiny_model(), prompt()
    attached = threading.Event()
    found: list[int] = []

    def second() -> None:
        with kvd_client.connect(runtime_dir) as other, attach(other, tiny_model(), input_ids, salt=salt) as cache:
            found.append(cache.num_cached_tokens)
            attached.set()

    with attach(client, model, input_ids, salt=salt) as cache:
        thread = threading.Thread(target=second)
        thread.start()
        with torch.no_grad():
            model(input_ids, cache=cache)
        assert attached.wait(30)
        thread.join()
    assert found == [96]


def test_a_generation_goes_on_when_the_pool_is_full(salt: str) -> None:
    model, input_ids = tiny_model(), prompt()
    with (
        private_daemon("--memory-budget", "128KiB", "--memory-segment", "64KiB") as daemon,
        kvd_client.connect(daemon.runtime_dir) as client,
        attach(client, model, input_ids, salt=salt) as cache,
    ):
        assert torch.equal(greedy(model, input_ids, 300, cache=cache), greedy(model, input_ids, 300))
        assert isinstance(cache.publish_error, OutOfBlocks)
        client.check()
        assert all(each.num_reserved == 0 for each in client.status().clients)


def test_a_client_that_was_closed_ends_the_generation(runtime_dir: Any, salt: str) -> None:
    model, input_ids = tiny_model(), prompt()
    with kvd_client.connect(runtime_dir) as client:
        cache = attach(client, model, input_ids, salt=salt)
        greedy(model, input_ids, 1, cache=cache)
    with pytest.raises(ClientClosed):
        greedy(model, input_ids, cache=cache)
    cache.close()


def test_a_generation_ends_well_without_its_daemon(salt: str, caplog: pytest.LogCaptureFixture) -> None:
    model, input_ids = tiny_model(), prompt()
    with (
        private_daemon("--memory-budget", "64MiB", "--memory-segment", "4MiB") as daemon,
        kvd_client.connect(daemon.runtime_dir) as client,
        attach(client, model, input_ids, salt=salt) as cache,
    ):
        daemon.process.kill()
        daemon.process.wait()
        # More than was reserved ahead: what is mapped is copied, and the generation goes on in private memory.
        output = greedy(model, input_ids, 200, cache=cache)
        assert torch.equal(output, greedy(model, input_ids, 200))
        assert cache.num_copied_bytes > 0
        cache.crop(-50)
        # The model may well have said the padding's token, which transformers would hide.
        whole = {"attention_mask": torch.ones_like(output)}
        expected = greedy(model, output, 5, **whole)
        with cache.fork() as fork:
            assert torch.equal(greedy(model, output, 5, cache=fork, **whole), expected)
        assert torch.equal(greedy(model, output, 5, cache=cache, **whole), expected)
        assert isinstance(cache.publish_error, DaemonRestarted)
        assert caplog.text.count("these blocks are not published") == 1
        with pytest.raises(DaemonRestarted):
            cache.commit()
