"""Whatever becomes of kvd, vLLM answers as without it: what cannot be loaded is computed, what cannot be saved lost."""

from __future__ import annotations

import contextlib

import pytest

import kvd_client
from kvd.errors import OutOfBlocks, OutOfMemory
from tests.vllm.engine import TEST_BOUND_S

pytestmark = pytest.mark.timeout(TEST_BOUND_S)
# case E4, in every test here: every kvd fault ends in recompute with equal output.


def kill(at: str, daemon) -> dict[str, object]:
    return {"at": at, "do": "kill", "pid": daemon.pid}


@pytest.mark.parametrize("at", ["match", "load"])
def test_the_daemon_is_killed_before_it_is_asked(writer, reader, plain, daemon, prompt, at):
    tokens = prompt(200)
    writer.generate(tokens)
    answer = reader.generate(tokens, trap=kill(at, daemon))
    assert (answer["sprung"], answer["loaded"], answer["cached"]) == (1, 0, [0])
    assert answer["tokens"] == plain.generate(tokens)["tokens"]
    assert any(kind.startswith(at) for kind in answer["faults"])
    assert reader.call("forget"), "no block of vLLM's stays taken"


def test_the_daemon_is_killed_during_a_load(writer, reader, plain, daemon, prompt):
    tokens = prompt(200)
    writer.generate(tokens)
    answer = reader.generate(tokens, trap=kill("copy_in", daemon))
    # The memory is mapped: it outlives the daemon.
    assert (answer["sprung"], answer["loaded"], answer["cached"]) == (1, 192, [192])
    assert answer["tokens"] == plain.generate(tokens)["tokens"]


@pytest.mark.parametrize("at", ["save", "copy_out", "seal"])
def test_the_daemon_is_killed_during_a_save(writer, plain, daemon, prompt, at):
    tokens = prompt(200)
    answer = writer.generate(tokens, trap=kill(at, daemon))
    assert (answer["sprung"], answer["saved"]) == (1, 0)
    assert answer["tokens"] == plain.generate(tokens)["tokens"]
    assert any(kind.startswith("save") for kind in answer["faults"])
    assert writer.call("forget"), "no block of vLLM's stays taken"


def test_a_daemon_that_comes_back_is_found_again(writer, reader, plain, daemon, prompt):
    first, second = prompt(200), prompt(200, number=1)
    daemon.kill()
    lost = writer.generate(first)
    assert (lost["saved"], lost["tokens"]) == (0, plain.generate(first)["tokens"])
    daemon.start()
    for engine in (writer, reader):
        engine.call("end_pause")
    assert writer.generate(second)["saved"] == 192
    assert reader.generate(second)["cached"] == [192]


def test_blocks_that_are_gone_when_they_are_to_be_loaded(writer, reader, plain, daemon, prompt):
    tokens = prompt(200)
    writer.generate(tokens)
    answer = reader.generate(tokens, trap={"at": "load", "do": "flush", "runtime_dir": str(daemon.folder)})
    assert (answer["sprung"], answer["loaded"], answer["cached"]) == (1, 0, [0])
    assert answer["saved"] == 192, "what was computed again is stored again"
    assert answer["tokens"] == plain.generate(tokens)["tokens"]
    assert answer["faults"]["load evicted"] == 1


def test_half_of_the_blocks_are_gone_when_they_are_to_be_loaded(writer, reader, plain, daemon, prompt):
    tokens, tail = prompt(100), prompt(100, number=1)
    writer.generate(tokens + tail)
    trap = {"at": "load", "do": "shorten", "tokens": tokens + tail, "num_kept": 96}
    answer = reader.generate(tokens + tail, trap=trap)
    assert (answer["sprung"], answer["loaded"]) == (1, 96)
    assert answer["tokens"] == plain.generate(tokens + tail)["tokens"]


def test_a_flipped_byte_is_never_attended_to(writer, reader, plain, daemon, prompt):
    tokens = prompt(200)
    writer.generate(tokens)
    writer.call("corrupt", tokens=tokens[:192])
    answer = reader.generate(tokens)
    assert (answer["loaded"], answer["faults"]["load corrupt-block"]) == (0, 1)
    assert answer["tokens"] == plain.generate(tokens)["tokens"]
    # The block was dropped, and the right one has taken its place.
    assert writer.call("forget")
    again = writer.generate(tokens)
    assert (again["cached"], again["tokens"]) == ([192], answer["tokens"])


def test_a_full_pool_drops_saves_and_nothing_else(writer, plain, daemon, prompt):
    tokens = prompt(200)
    with kvd_client.connect(daemon.folder) as client:
        # Of vLLM's own block size, so of the same pool.
        layout = kvd_client.KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", block_tokens=32)
        cache = client.cache(model="greedy@1", layout=layout)
        held = []
        try:
            for num_blocks in (64, 1):
                with contextlib.suppress(OutOfBlocks, OutOfMemory):
                    while True:
                        held.append(cache.allocate_sequence(32 * num_blocks))
            answer = writer.generate(tokens)
        finally:
            for sequence in held:
                sequence.close()
    assert answer["saved"] == 0
    assert set(answer["faults"]) <= {"save out-of-blocks", "save out-of-memory"}
    assert answer["tokens"] == plain.generate(tokens)["tokens"]
