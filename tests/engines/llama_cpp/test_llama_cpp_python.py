"""The real llama-cpp-python: another process goes on where this one has been. `make test-llama-cpp-python` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.llama_cpp.servers import ROOT, model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
import llama_cpp, kvd_client
from kvd_client.engines.llama_cpp import KvdLlamaCache
from llama_cpp.llama_cache import BaseLlamaCache

model, runtime_dir, options, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
llama = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, **options)
computed = []
evaluate = llama.eval
def counted(tokens):
    computed[-1] += len(tokens)
    return evaluate(tokens)
llama.eval = counted
client = None
if runtime_dir:
    client = kvd_client.connect(runtime_dir)
    llama.set_cache(KvdLlamaCache(client, llama))
    assert isinstance(llama.cache, BaseLlamaCache)
answers = []
for prompt in prompts:
    computed.append(0)
    answers.append(llama(prompt, max_tokens=8, temperature=0)["choices"][0]["text"])
print(json.dumps([answers, computed]))
if client is not None:
    client.close()
"""


def run(
    runtime_dir: Path | None, *prompts: str, model: Path | None = None, **options: Any
) -> tuple[list[str], list[int]]:
    """What each prompt was answered with, and how many tokens had to be computed for that."""
    arguments = [str(model or model_path()), str(runtime_dir or ""), json.dumps(options), json.dumps(prompts)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answers, computed = json.loads(done.stdout.splitlines()[-1])
    return answers, computed


def manual(name: str, num_lines: int = 12) -> str:
    return "".join(f"The part {name}-{i} of the machine has {i * 7 % 13} screws.\n" for i in range(num_lines))


def test_another_process_goes_on_where_the_first_has_been(llama_daemon):
    asked, other = manual("mu") + "How many screws has part mu-3?", manual("mu") + "Name a part."
    (alone_asked, alone_other), _ = run(None, asked, other)
    (answer,), (computed,) = run(llama_daemon, asked)
    assert answer == alone_asked
    assert computed > 150
    (warm,), (few,) = run(llama_daemon, other)
    assert warm == alone_other, "the same split: the manual, then the rest"
    assert few < 64


@pytest.mark.parametrize("what", ["weights", "dtype"])
def test_what_another_model_or_dtype_left_is_never_loaded(llama_daemon, tmp_path, what):  # case E5
    prompt = manual("nu", 8)
    run(llama_daemon, prompt)
    model, options = None, {}
    if what == "weights":
        model = tmp_path / model_path().name
        content = bytearray(model_path().read_bytes())
        content[-4711] ^= 1
        model.write_bytes(content)
    else:
        options = {"type_k": 8}  # GGML_TYPE_Q8_0
    _, (computed,) = run(llama_daemon, prompt, model=model, **options)
    assert computed > 100
