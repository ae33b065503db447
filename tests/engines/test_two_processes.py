"""What one process computed, a second one maps; its tokens and logits are those of a run without kvd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvd_client
from kvd.cli.demo import documents
from kvd.cli.demo.model import encode_prompt
from kvd_client.engines.transformers import attach
from tests.engines.other_process import NUM_NEW
from tests.engines.tiny import FAMILIES, greedy, prompt, tiny_model
from tests.support import smollm2

ROOT = Path(__file__).parents[2]


def in_another_process(
    runtime_dir: Path, model: str, salt: str, input_ids: torch.Tensor, attention: str = "sdpa"
) -> dict[str, Any]:
    environ = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients'}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "12345",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.other_process", str(runtime_dir), model, salt, attention],
        input=json.dumps(input_ids[0].tolist()),
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


# case E1
@pytest.mark.parametrize(("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("llama", "eager")])
def test_a_second_process_reuses_a_tiny_models_prefix(
    runtime_dir: Path, client: kvd_client.Client, tmp_path: Path, family: str, attention: str, salt: str
) -> None:
    model = tiny_model(family, attention=attention)
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", attn_implementation=attention).eval()
    input_ids = prompt(100)
    uncached = greedy(loaded, input_ids, NUM_NEW)
    with attach(client, loaded, input_ids, salt=salt) as cache:
        assert cache.num_cached_tokens == 0
        assert torch.equal(greedy(loaded, input_ids, NUM_NEW, cache=cache), uncached)

    told = in_another_process(runtime_dir, str(tmp_path / "model"), salt, input_ids, attention)

    assert told["num_cached"] == 96
    assert told["num_copied"] == 0
    assert told["tokens"] == uncached[0].tolist()
    assert told["equal_logits"] == [True] * NUM_NEW
    assert told["num_held"] == 100 + NUM_NEW - 1


# case E1
@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_second_process_reuses_smollm2s_prefix(runtime_dir: Path, client: kvd_client.Client, salt: str) -> None:
    model, tokenizer = smollm2.load()
    text = documents.read("pump")[:2000]
    first = encode_prompt(tokenizer, text, "How much does the pump weigh?")
    second = encode_prompt(tokenizer, text, "What is this manual for?")
    uncached = greedy(model, second, NUM_NEW)
    with attach(client, model, first, salt=salt) as cache:
        greedy(model, first, NUM_NEW, cache=cache)

    told = in_another_process(runtime_dir, "smollm2", salt, second)

    num_common = next(at for at, (a, b) in enumerate(zip(first[0], second[0], strict=False)) if a != b)
    assert told["num_cached"] == num_common // 16 * 16 > 400
    assert told["num_copied"] == 0
    assert told["tokens"] == uncached[0].tolist()
    assert all(told["equal_logits"])
