"""What one engine computed serves another, token by token the same; and what must never be shared is not."""

from __future__ import annotations

import pytest

import kvd_client
from tests.vllm import models
from tests.vllm.engine import TEST_BOUND_S

pytestmark = pytest.mark.timeout(TEST_BOUND_S)
BLOCK = 32


def test_a_second_engine_hits_what_the_first_stored(writer, reader, plain, prompt):  # case E4
    tokens = prompt(200)
    first = writer.generate(tokens)
    assert (first["cached"], first["saved"]) == ([0], 192)
    second = reader.generate(tokens)
    assert (second["cached"], second["loaded"]) == ([192], 192)
    assert first["tokens"] == second["tokens"] == plain.generate(tokens)["tokens"]
    assert second["faults"] == {}


def test_a_longer_prompt_uses_the_common_part_and_adds_the_rest(writer, reader, plain, prompt):
    common, tail = prompt(100), prompt(100, number=1)
    writer.generate(common)
    longer = reader.generate(common + tail)
    assert (longer["cached"], longer["saved"]) == ([96], 96)
    assert writer.generate(common + tail)["cached"] == [192]
    assert longer["tokens"] == plain.generate(common + tail)["tokens"]


def test_a_prompt_that_is_wholly_cached_leaves_a_token_to_compute(writer, reader, plain, prompt):  # case A7
    tokens = prompt(4 * BLOCK)
    writer.generate(tokens)
    again = reader.generate(tokens)
    assert again["cached"] == [3 * BLOCK]
    assert again["tokens"] == plain.generate(tokens)["tokens"]


def test_generated_tokens_are_shared_too(writer, reader, plain, prompt):
    tokens = prompt(50)
    (answer,) = writer.generate(tokens, num_new=60)["tokens"]
    dialogue = tokens + answer + prompt(20, number=1)
    # The last token of an answer was sampled, but nobody computed its keys and values.
    assert reader.generate(dialogue)["cached"] == [(len(tokens) + len(answer) - 1) // BLOCK * BLOCK]
    assert reader.generate(dialogue)["tokens"] == plain.generate(dialogue)["tokens"]


def test_two_engines_at_once(writer, reader, plain, prompt):
    shared = prompt(150)
    ours = [shared + prompt(30, number=number) for number in range(1, 5)]
    theirs = [shared + prompt(30, number=number) for number in range(3, 7)]
    for engine, prompts in ((writer, ours), (reader, theirs), (plain, ours + theirs)):
        engine.send("generate", prompts=prompts, num_new=20)
    answers = [engine.answer() for engine in (writer, reader, plain)]
    assert answers[0]["tokens"] + answers[1]["tokens"] == answers[2]["tokens"]
    # What both have stored is found by either.
    for engine in (writer, reader):
        assert engine.call("forget")
    assert min(writer.generate(*theirs)["cached"] + reader.generate(*ours)["cached"]) >= 160


def test_an_engine_loads_again_what_it_has_evicted_itself(writer, plain, prompt):
    tokens = prompt(200)
    writer.generate(tokens)
    assert writer.call("forget")
    again = writer.generate(tokens)
    assert (again["loaded"], again["saved"]) == (192, 0)
    assert again["tokens"] == plain.generate(tokens)["tokens"]


def test_more_requests_than_fit_preempt_each_other_and_store_the_right_blocks(writer, reader, plain, prompt):
    prompts = [prompt(300, number=number) for number in range(8)]
    # 64 blocks of 32 tokens hold four such requests to their end: blocks change hands while they are being saved.
    tokens = plain.generate(*prompts, num_new=180)["tokens"]
    stored = writer.generate(*prompts, num_new=180)
    assert stored["tokens"] == tokens
    assert stored["preempted"] > 0
    assert reader.generate(*prompts, num_new=180)["tokens"] == tokens
    answered = [ids + answer[:150] for ids, answer in zip(prompts, tokens, strict=True)]
    assert reader.call("forget")
    whole = reader.generate(*answered, num_new=30)
    assert min(whole["cached"]) >= 288
    assert whole["tokens"] == [answer[150:] for answer in tokens]
    for engine in (writer, reader):
        assert engine.call("forget"), "every block of vLLM's is free again"


def test_salts_keep_requests_apart(writer, reader, plain, prompt):  # case A3
    tokens = prompt(200)
    writer.generate(tokens, salt="one")
    assert reader.generate(tokens, salt="two")["cached"] == [0]
    assert reader.generate(tokens)["cached"] == [0]
    assert reader.call("forget")
    salted = reader.generate(tokens, salt="one")
    assert salted["cached"] == [192]
    assert salted["tokens"] == plain.generate(tokens)["tokens"]


def test_adapters_are_told_apart_by_their_content(writer, reader, plain, prompt, tmp_path):  # case A5
    tokens = prompt(200)
    one = models.adapter(tmp_path / "writers" / "adapter", seed=1)
    same = models.adapter(tmp_path / "readers" / "adapter", seed=1)
    other = models.adapter(tmp_path / "others" / "adapter", seed=2)
    adapted = writer.generate(tokens, lora=str(one))
    assert adapted["saved"] == 192
    assert reader.generate(tokens, lora=str(other))["cached"] == [0]
    assert reader.generate(tokens)["cached"] == [0]
    again = reader.generate(tokens, lora=str(same))
    assert again["cached"] == [192]
    assert adapted["tokens"] == again["tokens"] == plain.generate(tokens, lora=str(one))["tokens"]
    assert adapted["tokens"] != plain.generate(tokens)["tokens"], "the adapter changes what is generated"


def test_other_weights_of_the_same_shape_never_hit(writer, engines, daemon, prompt):  # case A4
    tokens = prompt(200)
    writer.generate(tokens)
    other = engines.other.generate(tokens)
    assert (other["cached"], other["loaded"], other["saved"]) == ([0], 0, 192)


def test_a_model_with_a_sliding_window_runs_and_is_left_alone(engines, daemon, prompt):
    tokens = prompt(200)
    first = engines.windowed.generate(tokens)
    assert (first["saved"], first["faults"]) == (0, {})
    assert "SlidingWindow" in engines.windowed.call("reason")
    assert engines.windowed.log().count("kvd stays out of this engine") == 1
    assert engines.windowed.call("forget")
    assert engines.windowed.generate(tokens)["tokens"] == first["tokens"]


def test_a_reset_reaches_every_engines_blocks(writer, reader, plain, prompt):  # case A9
    tokens = prompt(200)
    writer.generate(tokens)
    writer.generate(tokens, salt="salted")
    assert reader.call("reset")
    for engine, salt in ((reader, None), (reader, "salted")):
        assert engine.generate(tokens, salt=salt)["cached"] == [0]
    assert writer.call("forget")
    # What was computed since is shared again.
    again = writer.generate(tokens)
    assert again["cached"] == [192]
    assert again["tokens"] == plain.generate(tokens)["tokens"]


def test_the_daemon_hears_how_long_prefills_take_and_counts_what_was_spared(writer, reader, daemon, prompt):
    def figures() -> tuple[int, int, float, float]:
        with kvd_client.connect(daemon.folder) as client:
            status = client.status()
        shared = [each for each in status.namespaces if each.engine == "vllm/1"]
        computed = sum(each.computed_tokens for each in shared), sum(each.computed_s for each in shared)
        return computed[0], status.savings.num_tokens, computed[1], status.savings.prefill_s

    tokens = prompt(200)
    before = figures()
    # 300 tokens more, which are saved block by block: what a save finds of the last one has spared nobody anything.
    writer.generate(tokens, num_new=300)
    reader.generate(tokens)
    after = figures()
    assert (after[0] - before[0], after[1] - before[1]) == (200, 192)
    assert after[2] > before[2]
    assert after[3] > before[3]


def test_status_names_the_model_and_nothing_stays_held(writer, reader, daemon):
    writer.call("settle")
    reader.call("settle")
    with kvd_client.connect(daemon.folder) as client:
        client.check()
        status = client.status()
        assert "vllm/1" in {each.engine for each in status.namespaces}
        engines = [each for each in status.clients if each.label.startswith("vllm")]
        assert engines
        assert all((each.num_references, each.num_reserved, each.num_announced) == (0, 0, 0) for each in engines)
