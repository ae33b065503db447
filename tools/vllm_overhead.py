"""What storing costs a vLLM engine that finds nothing: `make bench-vllm`. One row, in the manner of `kvd bench`.

One engine with layers of SmolLM2-135M's shape and random weights; prompts that nobody had before. In turn the
connector asks and stores as ever, and is kept from both: the value is what a request takes with it, until all is
stored, the limit what it takes without.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_ROUNDS = 7
NUM_PROMPT, NUM_NEW = 512, 32
TARGET = 1.03

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Threads bound to cores that others use as well wait for each other far longer than they compute.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def make_model(folder: Path) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 8192}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2048))
    model.save_pretrained(folder)
    return str(folder)


def main() -> int:
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvd.cli.demo.daemon import private_daemon
    from kvd_client.engines.vllm import kvd_transfer_config
    from kvd_client.engines.vllm.scheduler import SchedulerSide

    with tempfile.TemporaryDirectory() as name, private_daemon("--memory-budget", "2GiB") as daemon:
        llm = LLM(
            make_model(Path(name)),
            kv_transfer_config=kvd_transfer_config(runtime_dir=str(daemon.runtime_dir)),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2048,
            enforce_eager=True,
        )
        connector = get_kv_transfer_group()
        greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, detokenize=False, ignore_eos=True)
        pick = random.Random(0)  # noqa: S311 - token ids, no secrets
        real = (SchedulerSide.num_matched, SchedulerSide._save)
        idle: tuple[Any, Any] = (lambda *_: 0, lambda *_: None)

        def measure(methods: tuple[Any, Any]) -> float:
            SchedulerSide.num_matched, SchedulerSide._save = methods  # type: ignore[method-assign]
            prompt = [pick.randrange(8192) for _ in range(NUM_PROMPT)]
            started_s = time.monotonic()
            llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
            connector._worker._saves._thread.submit(lambda: None).result()
            seconds = time.monotonic() - started_s
            print(f"{seconds:.2f}", file=sys.stderr, flush=True)
            return seconds

        for methods in (real, idle):
            measure(methods)
        before = connector.num_tokens_saved
        turns = itertools.islice(itertools.cycle([(real, idle), (idle, real)]), NUM_ROUNDS)
        pairs = [{methods is real: measure(methods) for methods in turn} for turn in turns]
        saved = connector.num_tokens_saved - before
        SchedulerSide.num_matched, SchedulerSide._save = real  # type: ignore[method-assign]
        llm.llm_engine.engine_core.shutdown()
    value, limit = (statistics.median(pair[kind] for pair in pairs) for kind in (True, False))
    ratio = statistics.median(pair[True] / pair[False] for pair in pairs)
    verdict = "ok" if ratio <= TARGET else "missed"
    print("row                              value   limit   ratio          target")
    print(
        f"vllm_store_overhead         {1000 * value:7,.0f} ms {1000 * limit:7,.0f}  {ratio:5.3f}x  {verdict:<6}  "
        f"<= {TARGET}x of generating {NUM_NEW} tokens behind {NUM_PROMPT}, nothing stored"
    )
    print(f"vllm_store_overhead: {saved} tokens stored in {NUM_ROUNDS} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
