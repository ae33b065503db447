"""Two vLLM engines, one after the other: the second one does not compute what the first has computed.

    kvd serve &                                                  # the daemon that keeps the blocks
    python clients/examples/vllm_shared.py [folder of a model]

Without a model: a small one with random weights, which is slow enough to see the difference and says nothing sensible.
Needs vLLM for the CPU beside kvd; `tools/setup-vllm` makes an environment with both, `.venv-vllm`.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import kvd_client
from kvd.errors import KvdError

NUM_SHARED = 2000
"""Tokens that both prompts begin with; others in each run, or a second run would find what the first one left."""

# The engine's steps run in the process that asks, and nothing is looked up on the network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def make_model(folder: str) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_engine(model: str, seed: int, own_token: int) -> tuple[float, int, int]:
    """Seconds to the first token, tokens that were found, tokens of the prompt."""
    from vllm import LLM, SamplingParams

    from kvd_client.engines.vllm import kvd_transfer_config

    llm = LLM(
        model,
        kv_transfer_config=kvd_transfer_config(),  # the line that changes
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
    )
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": [1] * 40}], once, use_tqdm=False)  # the first request warms the engine up
    prompt = [7 + (seed + place * place) % 900 for place in range(NUM_SHARED)] + [own_token] * 8
    started_s = time.monotonic()
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], once, use_tqdm=False)
    return time.monotonic() - started_s, answer.num_cached_tokens, len(prompt)


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        sys.exit("there is no vLLM here; tools/setup-vllm makes an environment with one: .venv-vllm/bin/python")
    try:
        kvd_client.connect().close()
    except KvdError as error:
        sys.exit(str(error))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    seed, taken_s = int(time.time()), []
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else make_model(folder)
        for name, own_token in (("first", 3), ("second", 4)):
            print(f"{name} engine: starting", flush=True)
            # A process of its own, which is gone before the next one starts.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                seconds, num_cached, num_tokens = process.submit(run_engine, model, seed, own_token).result()
            taken_s.append(seconds)
            print(f"{name} engine: first token after {seconds:.2f} s, {num_cached} of {num_tokens} tokens reused")
    if not num_cached:
        sys.exit("the second engine found nothing; with VLLM_LOGGING_LEVEL=INFO the engines' logs say why")
    print(f"the second engine's first token came {taken_s[0] / taken_s[1]:.1f} times sooner")


if __name__ == "__main__":
    main()
