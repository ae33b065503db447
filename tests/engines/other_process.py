"""Another inference process: `python -m tests.engines.other_process RUNTIME_DIR MODEL SALT ATTENTION`, ids on stdin.

MODEL is a folder that `save_pretrained` wrote, or "smollm2". Attaches, generates, and compares with a DynamicCache that
computed the prompt in the same two parts. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvd_client
from kvd_client.engines.transformers import attach
from tests.support import smollm2

NUM_NEW = 12


def generate(model: Any, input_ids: torch.Tensor, cache: Any, num_new: int = NUM_NEW) -> Any:
    """Greedy ids and the logits of each step."""
    return model.generate(
        input_ids,
        cache=cache,
        max_new_tokens=num_new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def generate_split(model: Any, input_ids: torch.Tensor, num_first: int, num_new: int = NUM_NEW) -> Any:
    """The control: without kvd, the first `num_first` tokens computed by themselves, as whoever left them did."""
    cache = DynamicCache(config=model.config)
    if num_first:
        with torch.no_grad():
            model(input_ids[:, :num_first], cache=cache)
    return generate(model, input_ids, cache, num_new)


def load(name: str, attention: str) -> Any:
    if name == "smollm2":
        return smollm2.load()[0]
    return AutoModelForCausalLM.from_pretrained(name, attn_implementation=attention).eval()


def main(runtime_dir: str, name: str, salt: str, attention: str) -> dict[str, Any]:
    model = load(name, attention)
    input_ids = torch.tensor([json.load(sys.stdin)])
    with kvd_client.connect(runtime_dir) as client, attach(client, model, input_ids, salt=salt) as cache:
        num_cached, num_copied = cache.num_cached_tokens, cache.num_copied_bytes
        found = generate(model, input_ids, cache)
        num_held = cache.get_seq_length()
    control = generate_split(model, input_ids, num_cached)
    return {
        "num_cached": num_cached,
        "num_copied": num_copied,
        "num_held": num_held,
        "tokens": found.sequences[0].tolist(),
        "equal_logits": [torch.equal(*pair) for pair in zip(found.logits, control.logits, strict=True)],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
