"""ttft_2048_cached, ttft_2048_cached_step, decode_2048 and decode_2048_dynamic: the real SmolLM2-135M on the CPU.

ttft_2048_cached. Timed: attaching to a prompt of 2049 tokens of which 2048 are cached, and the forward pass over the
one left, to the first token. Limit: the whole prompt through an empty DynamicCache; ratio: limit / value.

ttft_2048_cached_step. The same value; limit: the next decode step over the same views, which are warm by then.

decode_2048. Timed: one decode step with 2048 tokens before it, over kvd's views, publishing included. Limit: a
StaticCache filled with the same tokens. decode_2048_dynamic: the same value, limit: a DynamicCache.

Tokens that differ between the caches are noted.
"""

from __future__ import annotations

import time
from typing import Any

import kvd_client
from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved
from kvd.bench.shapes import MIB, prompt
from kvd.bench.smollm2 import Model

NUM_CACHED = 2048
STEPS = 4
MAX_TOKENS = 4096

TTFT = Target(name="ttft_2048_cached", unit="ms", text=">= 40x faster than the cold prefill", at_least=40)
TTFT_STEP = Target(name="ttft_2048_cached_step", unit="ms", text="<= 1.5x one warm decode step", at_most=1.5)
DECODE = Target(name="decode_2048", unit="ms a token", text="<= 1.15x StaticCache", at_most=1.15)
DECODE_DYNAMIC = Target(name="decode_2048_dynamic", unit="ms a token", text="below DynamicCache", at_most=1)


class Decoder:
    """A cache that holds the prompt, and the tokens that came from it."""

    def __init__(self, model: Model, cache: Any, token_ids: list[int]) -> None:
        self._model = model
        self.cache = cache
        self.tokens = [model.step(token_ids, cache)]

    def step_s(self) -> float:
        """Mean seconds of a decode step."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.tokens.append(self._model.step(self.tokens[-1:], self.cache))
        return (time.perf_counter() - start) / STEPS


class FirstToken:
    """The three ways to a first token."""

    def __init__(self, model: Model, client: kvd_client.Client, token_ids: list[int]) -> None:
        self._model = model
        self._client = client
        self._ids = token_ids
        self._step_s = 0.0
        self.first: set[int] = set()
        """The first tokens that came out: one, if all is well."""

    def cold_s(self) -> float:
        """Everything is computed."""
        start = time.perf_counter()
        self.first.add(self._model.step(self._ids, self._model.dynamic_cache()))
        return time.perf_counter() - start

    def cached_s(self) -> float:
        """All but one token are mapped."""
        start = time.perf_counter()
        with attach(self._client, self._model, self._ids) as cache:
            token = self._model.step(self._ids[cache.num_cached_tokens :], cache)
            end = time.perf_counter()
            if cache.num_cached_tokens != NUM_CACHED:
                raise CannotMeasure(f"only {cache.num_cached_tokens} of {NUM_CACHED} tokens were cached")
            self.first.add(token)
            self._model.step([token], cache)
            self._step_s = time.perf_counter() - end
        return end - start

    def warm_step_s(self) -> float:
        """The step after the first token."""
        self.cached_s()
        return self._step_s


def attach(
    client: kvd_client.Client,
    model: Model,
    token_ids: list[int],
    max_tokens: int = MAX_TOKENS,
    wait_s: float | None = None,
) -> Any:
    """A KvdCache; the engine is imported here because it imports torch."""
    from kvd_client.engines import transformers

    return transformers.attach(client, model.model, token_ids, max_tokens=max_tokens, wait_s=wait_s)


def _measure(run: Run) -> list[Row]:
    run.step("loading SmolLM2-135M")
    model = Model()
    ids = prompt(5, NUM_CACHED + 1)
    with PrivateDaemon(memory_budget=1024 * MIB) as daemon, daemon.connect() as client:
        run.step("prefilling three caches")
        with attach(client, model, ids) as cache:
            decoders = {
                "kvd": Decoder(model, cache, ids),
                # As long as it needs to be and no longer: it attends to its whole length at every step.
                "StaticCache": Decoder(model, model.static_cache(len(ids) + STEPS * (run.rounds + 1)), ids),
                "DynamicCache": Decoder(model, model.dynamic_cache(), ids),
            }
            steps = interleaved(run, {name: decoder.step_s for name, decoder in decoders.items()})
        first = FirstToken(model, client, ids)
        times = interleaved(
            run,
            {"cold prefill": first.cold_s, "cached prefill": first.cached_s, "warm step": first.warm_step_s},
        )
    kvd_ms, static_ms, dynamic_ms = (median * 1e3 for median in steps.values())
    cold_ms, cached_ms, step_ms = (median * 1e3 for median in times.values())
    differ = [name for name, decoder in decoders.items() if decoder.tokens != decoders["DynamicCache"].tokens]
    note = f"other tokens than DynamicCache's: {', '.join(differ)}" if differ else ""
    return [
        TTFT.row(cached_ms, cold_ms, ratio=cold_ms / cached_ms, note="" if len(first.first) == 1 else "tokens differ"),
        TTFT_STEP.row(cached_ms, step_ms),
        DECODE.row(kvd_ms, static_ms, note=note),
        DECODE_DYNAMIC.row(kvd_ms, dynamic_ms),
    ]


GROUP = Group((TTFT, TTFT_STEP, DECODE, DECODE_DYNAMIC), _measure)
