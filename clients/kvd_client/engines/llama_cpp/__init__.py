"""Share llama.cpp's KV cache with other processes, as snapshots of its sequence state.

llama.cpp takes no memory of ours: what it can do is write a sequence's whole state and read it again, which is a
hundred times faster than computing it. The states are blobs (`kvd_client.blobs`), found by the longest common prefix of
token ids.

- `KvdLlamaCache` is a cache for llama-cpp-python: `llama.set_cache(KvdLlamaCache(client, llama))`.
- `kvd llama-server -- ARGS...` runs a llama-server behind a proxy that restores before a completion and saves after it.

A state names no model and has no checksum of its own, and llama.cpp reads that of other weights without a word. So the
set of blobs is named by the weights' digest, the build of the engine and its options, and the content is compared with
its checksum: anything else is a miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd_client.engines.llama_cpp.snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from kvd_client.engines.llama_cpp.python_cache import KvdLlamaCache

__all__ = ["KvdLlamaCache", "Snapshot", "Snapshots"]


def __getattr__(name: str) -> Any:
    # Its base class comes with llama.cpp itself, which the proxy must not load.
    if name != "KvdLlamaCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvd_client.engines.llama_cpp.python_cache import KvdLlamaCache

    return KvdLlamaCache
