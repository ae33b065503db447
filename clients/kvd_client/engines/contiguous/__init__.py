"""A KV cache with one tensor a layer, for code that has its own attention: written in place, read whole.

    with kvd_client.connect() as client, ContiguousCache(
        client, num_layers=32, num_kv_heads=8, head_dim=128, max_tokens=4096, layout="bhsd", model="my-model@1"
    ) as cache:
        num_found = cache.attach(token_ids)              # what somebody computed already; at most len(token_ids) - 1
        keys, values = cache.update(0, new_keys, new_values)   # all of layer 0, no copy
        cache.commit(token_ids)                          # others find the full blocks from now on

Needs the `torch` extra.
"""

from __future__ import annotations

from kvd_client.engines.contiguous.arrangement import ARRANGEMENTS
from kvd_client.engines.contiguous.cache import ContiguousCache
from kvd_client.engines.contiguous.usage import MemoryUsage

__all__ = ["ARRANGEMENTS", "ContiguousCache", "MemoryUsage"]
