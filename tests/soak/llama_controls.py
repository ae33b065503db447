"""What llama-server says without kvd, for each place where a slot's content and the prompt may part."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from tests.engines.llama_cpp.servers import PlainServer
from tests.soak.engine_prompts import MIN_GAP, NUM_NEW, texts


def controls() -> list[list[int]]:
    """The right tokens of each prompt. Fails when they depend on the split, or might."""
    with PlainServer("--cache-ram", "0") as server:
        prompts = [server.post("/tokenize", {"content": text, "add_special": True})["tokens"] for text in texts()]
        return [_answer(server, prompt, [other for other in prompts if other != prompt]) for prompt in prompts]


def _answer(server: PlainServer, prompt: list[int], others: list[list[int]]) -> list[int]:
    # A slot holds another prompt, or this very one, of which the last token is computed again.
    common = {_num_common(prompt, other) for other in others}
    splits = {0, len(prompt) - 1, *(min(each, len(prompt) - 1) for each in common)}
    answers = [_split_answer(server, prompt, split) for split in sorted(splits)]
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def _split_answer(server: PlainServer, prompt: list[int], split: int) -> list[int]:
    server.complete("x", 1, id_slot=0, cache_prompt=False)
    if split:
        server.complete(prompt[:split], 1, id_slot=0, cache_prompt=False)
    answer = server.complete(prompt, NUM_NEW, id_slot=0, n_probs=2)
    assert answer["timings"]["cache_n"] == split
    for step in answer["completion_probabilities"]:
        first, second = step["top_logprobs"]
        assert _gap(first, second) >= MIN_GAP, (prompt, answer["content"])
    return answer["tokens"]


def _num_common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _gap(first: dict[str, Any], second: dict[str, Any]) -> float:
    return first["logprob"] - second["logprob"]
