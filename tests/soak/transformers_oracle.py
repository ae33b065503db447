"""What transformers says without kvd: `python -m tests.soak.transformers_oracle FILE`.

Every prompt is computed once for each place where a cached prefix of it may end: the prefix, then the rest. Prints the
tokens of each prompt's answer; FILE gets a list with its ids [1, n], and for each split the logits [steps, vocabulary].
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.engines.other_process import generate_split
from tests.soak.engine_prompts import BLOCK_TOKENS, MIN_GAP, NUM_NEW, texts
from tests.support import smollm2


def controls(model: Any, input_ids: torch.Tensor) -> tuple[dict[str, Any], list[int]]:
    """Of one prompt. Fails when its answer depends on the split, or might: then it is no prompt for a soak."""
    found = {}
    answers = []
    for split in range(0, input_ids.shape[1], BLOCK_TOKENS):
        control = generate_split(model, input_ids, split, NUM_NEW)
        found[split] = torch.cat(control.logits)
        answers.append(control.sequences[0, input_ids.shape[1] :].tolist())
    best = torch.log_softmax(found[0], dim=-1).topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    assert all(answer == answers[0] for answer in answers), answers
    assert gap >= MIN_GAP, (gap, answers[0])
    return {"input_ids": input_ids, "logits": found}, answers[0]


def main(file: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = smollm2.load()
    found = [controls(model, tokenizer(text, return_tensors="pt").input_ids) for text in texts()]
    torch.save([control for control, _ in found], file)
    for _, tokens in found:
        print(*tokens)


if __name__ == "__main__":
    main(sys.argv[1])
