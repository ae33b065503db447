"""`attach`: a prompt and a model in, a `KvdCache` with the longest cached prefix out."""

from __future__ import annotations

from typing import Any

from kvd.hashing import Namespace
from kvd_client.client import Client
from kvd_client.engines.transformers.cache import KvdCache
from kvd_client.engines.transformers.guard import GuardedModel
from kvd_client.engines.transformers.identity import model_identity
from kvd_client.engines.transformers.support import layout_of, require_eval, unwrap
from kvd_client.verb import Tokens


def namespace(model: Any, *, block_tokens: int | None = None, salt: str = "") -> Namespace:
    """What must be equal for a transformers model's KV to be exchangeable.

    Reads the weight files once, a second per gigabyte; the digest is remembered beside them.
    Raises `EngineUnsupported`.
    """
    inner = unwrap(model)
    require_eval(inner)
    identity = model_identity(inner)
    return Namespace(
        model=identity.model,
        layout=layout_of(inner, block_tokens),
        engine=identity.engine,
        positional=identity.positional,
        adapter=identity.adapter,
        salt=salt,
    )


def attach(
    client: Client,
    model: Any,
    input_ids: Tokens,
    *,
    max_tokens: int | None = None,
    wait_s: float | None = None,
    materialize: bool = False,
    verify: bool = False,
    checksums: bool = False,
    publish: bool = True,
    block_tokens: int | None = None,
    salt: str = "",
) -> KvdCache:
    """A cache for `model.generate(input_ids, cache=...)` with the longest cached prefix of `input_ids` mapped.

    `input_ids` is a [1, n] tensor or a list of n ids; at most n - 1 are attached. `max_tokens` bounds prompt and
    generated tokens together (default: n + 1024). When another process is computing the same prompt, attach waits for
    it up to `wait_s` seconds (None: the daemon's default; 0: never). `materialize` copies the prefix into private
    memory packed by layer. With `checksums` what this cache publishes carries them, and `verify` compares those of the
    prefix. Without `publish` nothing is shared before `commit`. Equal
    prompts under another `salt` don't meet.

    Raises `EngineUnsupported` (a model that cannot be served rightly), `InvalidTokens`, and what
    `kvd_client.Cache.sequence` raises.
    """
    inner = unwrap(model)
    space = namespace(inner, block_tokens=block_tokens, salt=salt)
    cache = client.cache(**_arguments(space), checksums=checksums)
    sequence = cache.sequence(input_ids, max_tokens, wait_s=wait_s, materialize=materialize, verify=verify)
    try:
        return KvdCache(sequence, GuardedModel(inner), publish=publish)
    except BaseException:
        sequence.close()
        raise


def _arguments(space: Namespace) -> dict[str, Any]:
    names = ("model", "layout", "engine", "positional", "adapter", "salt")
    return {name: getattr(space, name) for name in names}
