"""Attention over keys and values that lie in several parts: the scores of each part, one softmax over all of them.

Neither keys nor values are concatenated, nor repeated for grouped heads. Scores are made for so many queries at a time
that they stay within `MAX_SCORES_NBYTES`, so that a long prefill over a long prefix needs no more memory than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvd.errors import InvalidRequest

MAX_SCORES_NBYTES = 256 << 20

Part = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [num_kv_heads, tokens, head_dim] of consecutive tokens."""


def attend(
    query: torch.Tensor,
    parts: Sequence[Part],
    *,
    scaling: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = True,
    softcap: float | None = None,
    with_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention of `query` [num_heads, n, head_dim] over all parts together, of the same shape, and its weights.

    `parts` follow one another; T is the number of their tokens, num_heads a multiple of num_kv_heads. `mask`,
    broadcastable to [num_heads, n, T], is True where a query sees a token, or is added to the scores. Without one, and
    with `is_causal`, the last query sees every token, the one before it all but the last, and so on. `softcap` bounds
    the scores: softcap * tanh(score / softcap). The weights [num_heads, n, T] are returned where they are asked for.

    Softmax is in float32, products in the query's dtype. Raises `InvalidRequest` for shapes that don't go together.
    """
    num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_tokens = _check(query, parts)
    groups = num_heads // num_kv_heads
    step = max(1, MAX_SCORES_NBYTES // (4 * num_heads * num_tokens))
    starts = range(0, num_queries, step)
    output = query.new_empty(num_heads, num_queries, head_dim)
    all_weights = []
    for start in starts:
        stop = min(start + step, num_queries)
        grouped = query[:, start:stop].reshape(num_kv_heads, groups * (stop - start), head_dim)
        scores = _scores(grouped, parts, num_tokens).view(num_heads, stop - start, num_tokens)
        scores *= scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        seen = mask[..., start:stop, :] if mask is not None and mask.shape[-2] > 1 else mask
        if seen is None and is_causal and num_queries > 1:
            seen = _causal(start, stop, num_queries, num_tokens, query.device)
        if seen is not None:
            scores = _masked(scores, seen)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        mixed = _mixed(weights.view(num_kv_heads, -1, num_tokens), parts)
        output[:, start:stop] = mixed.view(num_heads, stop - start, head_dim)
        if with_weights:
            all_weights.append(weights)
    return output, torch.cat(all_weights, dim=1) if with_weights else None


def _check(query: torch.Tensor, parts: Sequence[Part]) -> tuple[int, int]:
    """(num_kv_heads, tokens of all parts)."""
    if not parts:
        raise InvalidRequest("attention over no part at all")
    num_kv_heads = parts[0][0].shape[0]
    for keys, values in parts:
        if keys.dim() != 3 or keys.shape != values.shape or keys.shape[0] != num_kv_heads:
            raise InvalidRequest(f"keys {list(keys.shape)} and values {list(values.shape)} do not go together")
        if keys.shape[2] != query.shape[2] or keys.dtype != query.dtype or values.dtype != query.dtype:
            raise InvalidRequest(
                f"a query of {query.shape[2]} x {query.dtype} over keys of {keys.shape[2]} x {keys.dtype} and values "
                f"of {values.dtype}"
            )
    if query.shape[0] % num_kv_heads:
        raise InvalidRequest(f"{query.shape[0]} heads cannot share {num_kv_heads} key and value heads evenly")
    return num_kv_heads, sum(keys.shape[1] for keys, _ in parts)


def _scores(grouped: torch.Tensor, parts: Sequence[Part], num_tokens: int) -> torch.Tensor:
    """[num_kv_heads, queries of a group, T] of `grouped` [num_kv_heads, queries of a group, head_dim]."""
    scores = grouped.new_empty(*grouped.shape[:2], num_tokens)
    at = 0
    for keys, _ in parts:
        scores[..., at : at + keys.shape[1]] = torch.matmul(grouped, keys.transpose(1, 2))
        at += keys.shape[1]
    return scores


def _mixed(weights: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """[num_kv_heads, queries of a group, head_dim]: the values in the weights' proportion."""
    mixed: torch.Tensor | None = None
    at = 0
    for _, values in parts:
        share = torch.matmul(weights[..., at : at + values.shape[1]], values)
        mixed = share if mixed is None else mixed.add_(share)
        at += values.shape[1]
    assert mixed is not None  # noqa: S101 - `_check` saw a part
    return mixed


def _causal(start: int, stop: int, num_queries: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    queries = torch.arange(start, stop, device=device) + num_tokens - num_queries
    return torch.arange(num_tokens, device=device) <= queries[:, None]


def _masked(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    if seen.dtype is torch.bool:
        # Not -inf: a query that sees nothing gets some average rather than NaN, as in transformers.
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores + seen
