"""Attention over parts equals attention over the whole: transformers' own eager function, and sdpa."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from kvd.errors import InvalidRequest
from kvd_client.engines.transformers import split_attention
from kvd_client.engines.transformers.split_attention import Part, attend

HEADS, DIM = 4, 16
SCALING = DIM**-0.5


def states(num_heads: int, num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_heads, num_tokens, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(num_kv_heads: int, num_queries: int, lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[Part]]:
    parts = [(states(num_kv_heads, n, 10 + n), states(num_kv_heads, n, 50 + n)) for n in lengths]
    return states(HEADS, num_queries, 1), parts


def whole(parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([keys for keys, _ in parts], 1)[None], torch.cat([values for _, values in parts], 1)[None]


def causal(num_queries: int, num_tokens: int) -> torch.Tensor:
    return torch.ones(num_queries, num_tokens, dtype=torch.bool).tril(num_tokens - num_queries)


def windowed(num_queries: int, num_tokens: int) -> torch.Tensor:
    return causal(num_queries, num_tokens).triu(num_tokens - num_queries - 7)


def padded(num_queries: int, num_tokens: int) -> torch.Tensor:
    mask = causal(num_queries, num_tokens)
    mask[:, :3] = False
    return mask


MASKS = {"causal": causal, "a window": windowed, "padding": padded}


def eager(query: torch.Tensor, parts: list[Part], mask: torch.Tensor, softcap: float | None = None) -> Any:
    keys, values = whole(parts)
    module = SimpleNamespace(num_key_value_groups=HEADS // keys.shape[1], training=False, head_dim=DIM)
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    output, weights = eager_attention_forward(
        module, query[None], keys, values, additive, scaling=SCALING, softcap=softcap
    )
    return output[0].transpose(0, 1), weights[0]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("num_queries", "lengths"), [(1, (30, 5)), (12, (32, 20)), (40, (16, 40)), (9, (8, 3, 9))])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_it_equals_eager_attention(
    num_kv_heads: int, num_queries: int, lengths: tuple[int, ...], masked: str, softcap: float | None
) -> None:
    query, parts = case(num_kv_heads, num_queries, lengths)
    mask = MASKS[masked](num_queries, sum(lengths))
    expected, expected_weights = eager(query, parts, mask, softcap)
    for given in (mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min), mask[None]):
        output, weights = attend(query, parts, scaling=SCALING, mask=given, softcap=softcap, with_weights=True)
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("num_queries", "lengths"), [(1, (30, 5)), (12, (32, 20))])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_it_equals_sdpa(
    num_kv_heads: int, num_queries: int, lengths: tuple[int, ...], dtype: torch.dtype, within: float
) -> None:
    query, parts = case(num_kv_heads, num_queries, lengths)
    query, parts = query.to(dtype), [(keys.to(dtype), values.to(dtype)) for keys, values in parts]
    keys, values = whole(parts)
    expected = scaled_dot_product_attention(
        query[None], keys, values, attn_mask=causal(num_queries, sum(lengths)), scale=SCALING, enable_gqa=True
    )
    output, weights = attend(query, parts, scaling=SCALING)
    torch.testing.assert_close(output, expected[0], atol=within, rtol=within)
    assert weights is None
    assert output.dtype is dtype


def test_a_mask_may_differ_between_heads() -> None:
    query, parts = case(2, 6, (10, 6))
    mask = torch.stack([windowed(6, 16), causal(6, 16), padded(6, 16), causal(6, 16)])
    output, _ = attend(query, parts, scaling=SCALING, mask=mask)
    for head in range(HEADS):
        own = [(keys[head // 2 :][:1], values[head // 2 :][:1]) for keys, values in parts]
        alone, _ = attend(query[head : head + 1], own, scaling=SCALING, mask=mask[head])
        torch.testing.assert_close(output[head : head + 1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 2, 12])
@pytest.mark.parametrize("is_causal", [True, False])
def test_without_a_mask_it_is_causal_or_not(num_queries: int, is_causal: bool) -> None:
    query, parts = case(2, num_queries, (32, 20))
    mask = causal(num_queries, 52) if is_causal else torch.ones(num_queries, 52, dtype=torch.bool)
    expected, _ = eager(query, parts, mask)
    output, _ = attend(query, parts, scaling=SCALING, is_causal=is_causal)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def of_heads(num_queries: int, num_tokens: int) -> torch.Tensor:
    return torch.stack([mask(num_queries, num_tokens) for mask in (windowed, causal, padded, causal)])


def of_all_queries(num_queries: int, num_tokens: int) -> torch.Tensor:
    return padded(num_queries, num_tokens)[-1:]


STEPWISE: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"is_causal": False},
    "a mask": {"mask": windowed(40, 56)},
    "a mask of each head": {"mask": of_heads(40, 56)},
    "one mask for all queries": {"mask": of_all_queries(40, 56)},
}


@pytest.mark.parametrize("limit", [4 * HEADS * 56 * 7, 1])
@pytest.mark.parametrize("how", STEPWISE)
def test_few_queries_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch, how: str, limit: int) -> None:
    query, parts = case(2, 40, (16, 40))
    expected, expected_weights = attend(query, parts, scaling=SCALING, with_weights=True, **STEPWISE[how])
    scored, inner = [], split_attention._scores

    def scores(*arguments: Any) -> torch.Tensor:
        scored.append(inner(*arguments))
        return scored[-1]

    monkeypatch.setattr(split_attention, "MAX_SCORES_NBYTES", limit)
    monkeypatch.setattr(split_attention, "_scores", scores)
    output, weights = attend(query, parts, scaling=SCALING, with_weights=True, **STEPWISE[how])
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    num_at_a_time = max(1, limit // (4 * HEADS * 56))
    assert max(each.nbytes for each in scored) == 4 * HEADS * 56 * num_at_a_time


def test_a_query_that_sees_nothing_spoils_no_other() -> None:
    query, parts = case(2, 5, (8, 5))
    mask = causal(5, 13)
    expected, _ = attend(query, parts, scaling=SCALING, mask=mask)
    mask[1] = False
    output, _ = attend(query, parts, scaling=SCALING, mask=mask)
    assert output.isfinite().all()
    for place in (0, 2, 3, 4):
        torch.testing.assert_close(output[:, place], expected[:, place])


class NoCopies(TorchFunctionMode):
    """Fails where keys or values are joined or repeated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in {"cat", "concat", "repeat", "repeat_interleave", "stack", "contiguous", "clone"}
        return func(*args, **(kwargs or {}))


def test_keys_and_values_stay_where_they_are() -> None:
    query, parts = case(2, 5, (8, 5))
    with NoCopies():
        attend(query, parts, scaling=SCALING)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(states(2, 4, 1), states(2, 5, 1))],
        [(states(2, 4, 1), states(2, 4, 1)), (states(4, 4, 1), states(4, 4, 1))],
        [(states(3, 4, 1), states(3, 4, 1))],
        [(states(2, 4, 1).half(), states(2, 4, 1))],
        [(states(2, 4, 1), states(2, 4, 1).half())],
        [(states(2, 4, 1)[..., :8], states(2, 4, 1)[..., :8])],
        [(states(2, 4, 1)[..., None], states(2, 4, 1)[..., None])],
    ],
    ids=[
        "none",
        "lengths",
        "heads of parts",
        "heads of the query",
        "keys' dtype",
        "values' dtype",
        "size of heads",
        "axes",
    ],
)
def test_what_does_not_go_together_is_refused(parts: list[Part]) -> None:
    with pytest.raises(InvalidRequest):
        attend(states(HEADS, 1, 1), parts, scaling=SCALING)
