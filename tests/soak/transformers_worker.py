"""One transformers process of the soak: plain `generate` within `shared`, until its standard input is closed.

`python -m tests.soak.transformers_worker RUNTIME_DIR SEED ORACLE`, where ORACLE is what `transformers_oracle` wrote.
Prints one JSON line for each answer, with how far its logits are from those of the control with the same split.
"""

from __future__ import annotations

import json
import random
import select
import sys
from typing import Any

import torch

from kvd_client.engines.transformers import shared
from tests.engines.other_process import generate
from tests.soak.engine_prompts import NUM_NEW
from tests.support import smollm2


def ask(model: Any, control: dict[str, Any], statistics: Any) -> dict[str, Any]:
    """One call, and what came of it."""
    num_served, num_cached = statistics.num_served, statistics.num_cached_tokens
    answer = generate(model, control["input_ids"], None, NUM_NEW)
    if statistics.num_served > num_served:
        answer.cache.close()
    num_reused = statistics.num_cached_tokens - num_cached
    return {
        "num_reused": num_reused,
        "why_not": "" if statistics.num_served > num_served else statistics.last_reason,
        "tokens": answer.sequences[0, control["input_ids"].shape[1] :].tolist(),
        "deviation": float((torch.cat(answer.logits) - control["logits"][num_reused]).abs().max()),
    }


def main(runtime_dir: str, seed: str, oracle: str) -> None:
    torch.set_num_threads(1)
    choose = random.Random(seed)
    model, controls = smollm2.load()[0], torch.load(oracle, weights_only=True)
    with shared(model, runtime_dir=runtime_dir) as statistics:
        while not select.select([sys.stdin], [], [], 0)[0]:
            prompt = choose.randrange(len(controls))
            print(json.dumps({"prompt": prompt, **ask(model, controls[prompt], statistics)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
