"""`attach`: prompts and a model in, a `KvdCache` with the longest cached prefixes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvd.errors import InvalidRequest
from kvd.hashing import Namespace
from kvd_client.client import Client
from kvd_client.core.verb import Tokens
from kvd_client.engines.transformers.cache import KvdCache
from kvd_client.engines.transformers.guard import GuardedModel
from kvd_client.engines.transformers.identity import model_identity
from kvd_client.engines.transformers.step_checks import check_mask, padding_of
from kvd_client.engines.transformers.support import layout_of, require_eval, unwrap
from kvd_client.sequence import Sequence


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
    attention_mask: torch.Tensor | None = None,
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

    `input_ids` is a [1, n] tensor or a list of n ids; at most n - 1 are attached. Of a batch [rows, n] each row is a
    sequence of its own; rows are padded on the left, and `attention_mask` [rows, n] says where, as `generate` wants it.
    `max_tokens` bounds prompt and generated tokens of a row together (default: its own tokens + 1024). When another
    process is computing the same prompt, attach waits for it up to `wait_s` seconds (None: the daemon's default, and
    not at all for rows after the first; 0: never). `materialize` copies the prefix into private memory packed by layer;
    a model that is not where the daemon's pool is gets such a copy on its own device in any case. With `checksums` what
    this cache publishes carries them, and `verify` compares those of the prefix. Without `publish` nothing is shared
    before `commit`. Equal prompts under another `salt` don't meet.

    Raises `EngineUnsupported` (a model that cannot be served rightly), `InvalidTokens`, and what
    `kvd_client.Cache.sequence` raises.
    """
    inner = unwrap(model)
    space = namespace(inner, block_tokens=block_tokens, salt=salt)
    cache = client.cache(**_arguments(space), checksums=checksums, computes_on=inner.device)
    sequences: list[Sequence] = []
    paddings: list[int] = []
    try:
        for ids, padding in _prompts(input_ids, attention_mask):
            # While it holds announcements of one row a session that waits for others might have them wait for it.
            row_wait_s = 0.0 if sequences and wait_s is None else wait_s
            sequence = cache.sequence(ids, max_tokens, wait_s=row_wait_s, materialize=materialize, verify=verify)
            sequences.append(sequence)
            paddings.append(padding)
        return KvdCache(sequences, GuardedModel(inner), paddings=paddings, publish=publish)
    except BaseException:
        for sequence in sequences:
            sequence.close()
        raise


def _prompts(input_ids: Tokens, mask: torch.Tensor | None) -> Iterator[tuple[Tokens, int]]:
    """(ids, columns of padding) of each row."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        if mask is not None:
            raise InvalidRequest("an attention_mask goes with input_ids of shape [rows, n]")
        yield input_ids, 0
        return
    num_rows, num_columns = input_ids.shape
    paddings = padding_of(mask, num_rows)
    check_mask(mask, paddings, num_columns)
    for row, padding in zip(input_ids, paddings, strict=True):
        yield row[padding:], padding


def _arguments(space: Namespace) -> dict[str, Any]:
    names = ("model", "layout", "engine", "positional", "adapter", "salt")
    return {name: getattr(space, name) for name in names}
