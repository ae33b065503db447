"""What storing costs a vLLM engine that finds nothing: `make bench-vllm`. Rows in the manner of `kvd bench`.

One engine with layers of SmolLM2-135M's shape and random weights; prompts that nobody had before. In turn the
connector asks and stores as ever, and does nothing, as in an engine that kvd stays out of. The value is what a request
takes with it, until all is stored; the limit what it takes without. One row has the time that passes, the other what
all threads of the engine's process compute meanwhile: what another core does for it costs no time and is not free.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvd.bench.row import QUICK_ROUNDS, Row, Target
from kvd.cli.console import console
from kvd.cli.demo.daemon import private_daemon
from kvd.cli.render_bench import render_rows

NUM_PROMPT, NUM_NEW = 500, 64
"""Three blocks of 128 tokens are full after the prefill, the fourth one while tokens are generated."""
VOCABULARY = 8192
TARGETS = tuple(
    Target(name=name, unit="s", at_most=1.03, text=f"<= 1.03x of {NUM_NEW} tokens behind {NUM_PROMPT}, nothing stored")
    for name in ("vllm_store_overhead", "vllm_store_overhead_cpu")
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads bound to cores that others use as well wait for each other far longer than they compute.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class Engine:
    """A vLLM engine in this process, whose connector can be kept from everything."""

    def __init__(self, model: Path, runtime_dir: Path) -> None:
        from vllm import LLM, SamplingParams
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvd_client.engines.vllm import kvd_transfer_config

        self._llm = LLM(
            _make_model(model),
            kv_transfer_config=kvd_transfer_config(runtime_dir=str(runtime_dir)),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2048,
            enforce_eager=True,
        )
        self._core: Any = self._llm.llm_engine.engine_core.engine_core
        self._connectors = (self._core.scheduler.connector, get_kv_transfer_group())
        self._sides = (self._connectors[0]._scheduler, self._connectors[1]._worker)
        if None in self._sides:
            raise SystemExit(f"kvd stays out of this engine: {self._connectors[0].reason}")
        self._greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, detokenize=False, ignore_eos=True)
        self._pick = random.Random(0)  # noqa: S311 - token ids, no secrets

    @property
    def num_stored(self) -> int:
        return int(self._sides[1].num_tokens_saved)

    def measure(self, *, stores: bool) -> tuple[float, float]:
        """(seconds, seconds of computing) that one request takes, until what it stores is stored."""
        self._connectors[0]._scheduler, self._connectors[1]._worker = self._sides if stores else (None, None)
        prompt = [self._pick.randrange(VOCABULARY) for _ in range(NUM_PROMPT)]
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        self._llm.generate([{"prompt_token_ids": prompt}], self._greedy, use_tqdm=False)
        while self._core.scheduler.has_requests():
            self._llm.llm_engine.step()
        self._sides[1]._saves._thread.submit(lambda: None).result()
        return time.monotonic() - started_s, time.process_time() - started_cpu_s

    def close(self) -> None:
        self._connectors[0]._scheduler, self._connectors[1]._worker = self._sides
        self._llm.llm_engine.engine_core.shutdown()


def _make_model(folder: Path) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2048)).save_pretrained(folder)
    return str(folder)


def rows_of(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]], note: str) -> list[Row]:
    """`pairs`: of each round (with kvd, without), each (seconds, of computing). Medians; a ratio is one round's."""
    rows = []
    for place, target in enumerate(TARGETS):
        stored, plain = ([taken[place] for taken in kind] for kind in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in zip(stored, plain, strict=True))
        rows.append(target.row(statistics.median(stored), statistics.median(plain), ratio=ratio, note=note))
    return rows


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measured(num_rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name, private_daemon("--memory-budget", "2GiB") as daemon:
        _tell("starting an engine")
        engine = Engine(Path(name), daemon.runtime_dir)
        pairs = []
        for stores in (True, False):
            _tell(f"warming up: {engine.measure(stores=stores)[0]:.2f} s")
        before = engine.num_stored
        for number in range(num_rounds):
            # The order alternates, so that neither kind always comes second.
            turn = (True, False) if number % 2 else (False, True)
            taken = {stores: engine.measure(stores=stores) for stores in turn}
            pairs.append((taken[True], taken[False]))
            _tell(f"round {number + 1} of {num_rounds}: {taken[True][0]:.2f} s, without kvd {taken[False][0]:.2f} s")
        stored = engine.num_stored - before
        engine.close()
    threads = f"{os.environ['OMP_NUM_THREADS']} of {os.cpu_count()} cores compute"
    return rows_of(pairs, f"{stored} tokens stored in {num_rounds} rounds; {threads}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What storing costs a vLLM engine that finds nothing.")
    parser.add_argument(
        "--json", action="store_true", help="a list of objects: name, unit, value, limit, ratio, target, ok"
    )
    parser.add_argument("--rounds", type=int, default=QUICK_ROUNDS, help="pairs of requests, with kvd and without")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows = _measured(arguments.rounds)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        console().print(render_rows(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
