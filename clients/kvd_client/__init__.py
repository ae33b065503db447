"""Attach a process to kvd: find the cached prefix of a prompt, map it, extend it, publish it.

    with kvd_client.connect() as client:
        cache = client.cache(model="smollm2-135m@sha256:...", layout=KVLayout(num_layers=30, ...))
        with cache.sequence(token_ids, max_tokens=4096) as seq:
            keys, values = seq.layer(0)            # torch views [num_kv_heads, tokens, head_dim], no copy
            seq.append(0, new_keys, new_values)    # writes the private tail in place
            seq.commit()                           # full blocks are found by everybody from now on

`kvd_client.aio` has the same verbs for asyncio. torch is imported only where a tensor is asked for or given.
"""

from __future__ import annotations

from kvd.errors import KvdError
from kvd.hashing import Namespace
from kvd.layout import KVLayout
from kvd_client.blobs import Blobs
from kvd_client.cache import Cache
from kvd_client.client import Client, connect
from kvd_client.core.verb import Tokens
from kvd_client.sequence import Sequence
from kvd_client.statistics import CacheStatistics

__all__ = [
    "Blobs",
    "Cache",
    "CacheStatistics",
    "Client",
    "KVLayout",
    "KvdError",
    "Namespace",
    "Sequence",
    "Tokens",
    "connect",
]
