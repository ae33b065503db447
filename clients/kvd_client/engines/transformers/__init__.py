"""Share a transformers model's KV cache with other processes.

    with kvd_client.connect() as client, attach(client, model, input_ids) as cache:
        output = model.generate(input_ids, cache=cache, max_new_tokens=200)

    with shared(model) as statistics:
        output = model.generate(input_ids, max_new_tokens=200)    # as ever

`attach` maps the longest cached prefix of the prompt; `generate` computes the rest, and every block it completes is
published at once, so that others find it. Nothing is copied. `past_key_values=cache` works as well.

Served are decoder models whose layers have full or sliding-window attention (Llama, Qwen2, Qwen3, SmolLM, Mistral,
Gemma-2, Gemma-3, ...): one prompt or a batch padded on the left, sampled, by beams or assisted, prefilled in chunks,
streamed. What is not served is refused with `EngineUnsupported`; a call that would use the cache for other tokens than
it holds with `InvalidRequest`. Needs the `transformers` extra.
"""

from __future__ import annotations

from kvd_client.engines.transformers.attach import attach, namespace
from kvd_client.engines.transformers.cache import KvdCache
from kvd_client.engines.transformers.identity import ModelIdentity, model_identity
from kvd_client.engines.transformers.sharing import SharingStatistics, shared
from kvd_client.engines.transformers.support import layout_of

__all__ = [
    "KvdCache",
    "ModelIdentity",
    "SharingStatistics",
    "attach",
    "layout_of",
    "model_identity",
    "namespace",
    "shared",
]
