"""KV that is computed once, however many processes ask for it at the same moment.

Start `kvd serve`, then run this in several terminals: `python clients/examples/get_or_compute.py`.
"""

from __future__ import annotations

import time

import torch

import kvd_client
from kvd_client import KVLayout

token_ids = list(range(1000, 1512))


def compute(seq: kvd_client.Sequence) -> None:
    """Stands for a prefill that takes a second: appends what is missing, in every layer."""
    num_missing = len(token_ids) - seq.num_cached_tokens
    time.sleep(num_missing / len(token_ids))
    states = torch.zeros(seq.layout.num_kv_heads, num_missing, seq.layout.head_dim, dtype=torch.float16)
    for layer in range(seq.layout.num_layers):
        seq.append(layer, states, states)


with kvd_client.connect() as client:
    cache = client.cache(model="example@1", layout=KVLayout(num_layers=4, num_kv_heads=2, head_dim=64))
    start = time.perf_counter()
    with cache.get_or_compute(token_ids, compute) as seq:
        taken_s = time.perf_counter() - start
        print(f"{seq.num_tokens} tokens after {taken_s:.2f} s, {seq.num_cached_tokens} of them found")
    statistics = cache.statistics()
    print(f"hits of all processes: {statistics.memory.rate:.0%} in memory", end="")
    print("".join(f", {found.rate:.0%} in {tier}" for tier, found in statistics.tiers.items()))
