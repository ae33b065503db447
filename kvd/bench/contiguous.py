"""contiguous_update. Timed: `ContiguousCache.update` of one token in each of SmolLM2's 30 layers behind 2048 tokens,
the whole layer's keys and values returned. Limit: the same by hand, over one plain tensor of keys and one of values a
layer, set aside beforehand: two slice assignments, two slices. Microseconds a layer.

The note has the ratio for 128 tokens at a time, whose rows lie a token's width apart in kvd (token-major blocks).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved
from kvd.bench.shapes import MIB, SMOLLM2

if TYPE_CHECKING:
    from kvd_client.engines.contiguous import ContiguousCache

NUM_HELD = 2048
CHUNK = 128
STEPS = 8

UPDATE = Target(name="contiguous_update", unit="us a layer", text="<= 1.2x plain in-place writes", at_most=1.2)


class PlainCache:
    """What one writes by hand: tensors [1, heads, max, dim] of a layer, one length for all."""

    def __init__(self, torch: Any, max_tokens: int) -> None:
        shape = (1, SMOLLM2.num_kv_heads, max_tokens, SMOLLM2.head_dim)
        self._layers = [
            (torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16))
            for _ in range(SMOLLM2.num_layers)
        ]
        self._length = 0

    def step(self, keys: Any, values: Any) -> None:
        """The next tokens of every layer."""
        start, stop = self._length, self._length + keys.shape[2]
        for own_keys, own_values in self._layers:
            own_keys[:, :, start:stop] = keys
            own_values[:, :, start:stop] = values
            _whole = own_keys[:, :, :stop], own_values[:, :, :stop]
        self._length = stop


def _steps_s(step: Callable[[Any, Any], None], keys: Any, values: Any) -> float:
    """Median seconds of a layer's update."""
    taken = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step(keys, values)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / SMOLLM2.num_layers


def _update_all(cache: ContiguousCache, keys: Any, values: Any) -> None:
    for layer in range(SMOLLM2.num_layers):
        cache.update(layer, keys, values)


def _measure(run: Run) -> list[Row]:
    try:
        import torch
    except ImportError as error:
        raise CannotMeasure("needs torch: pip install 'kvd-daemon[torch]'") from error
    from kvd_client.engines.contiguous import ContiguousCache

    max_tokens = NUM_HELD + (CHUNK + 1) * STEPS * (run.rounds + 1)
    with (
        PrivateDaemon(memory_budget=2048 * MIB) as daemon,
        daemon.connect() as client,
        ContiguousCache(
            client,
            num_layers=SMOLLM2.num_layers,
            num_kv_heads=SMOLLM2.num_kv_heads,
            head_dim=SMOLLM2.head_dim,
            max_tokens=max_tokens,
            layout="bhsd",
        ) as cache,
    ):
        plain = PlainCache(torch, max_tokens)

        def ours(keys: Any, values: Any) -> None:
            _update_all(cache, keys, values)

        ratios = {}
        for num_tokens in (NUM_HELD, 1, CHUNK):
            shape = (1, SMOLLM2.num_kv_heads, num_tokens, SMOLLM2.head_dim)
            keys, values = (torch.randn(shape).to(torch.float16) for _ in range(2))
            if num_tokens == NUM_HELD:
                ours(keys, values)
                plain.step(keys, values)
                continue

            def update_s(keys: Any = keys, values: Any = values) -> float:
                return _steps_s(ours, keys, values)

            def plain_s(keys: Any = keys, values: Any = values) -> float:
                return _steps_s(plain.step, keys, values)

            ratios[num_tokens] = interleaved(run, {"update": update_s, "plain": plain_s})
    one, many = ratios[1], ratios[CHUNK]
    note = f"{CHUNK} tokens at a time: {many['update'] / many['plain']:.2f}x"
    return [UPDATE.row(one["update"] * 1e6, one["plain"] * 1e6, note=note)]


GROUP = Group((UPDATE,), _measure)
