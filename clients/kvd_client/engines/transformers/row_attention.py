"""transformers' attention, sequence by sequence, over what a `KvdCache` holds in several places.

A batch's rows lie in sequences of their own, and a row on a device pool in two parts; no single tensor shows them. So a
layer hands the model two `RowStates` in the place of keys and values, and the model is switched to the attention
functions registered here, which take each row's queries to that row's parts. Plain tensors, of any other cache, go to
the function that the model had before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from kvd.errors import EngineUnsupported
from kvd_client.engines.transformers.split_attention import Part, attend
from kvd_client.engines.transformers.support import decoder_config

NAME_BY_IMPLEMENTATION = {"sdpa": "kvd_sdpa", "eager": "kvd_eager"}
"""What the model computes with -> what takes its place."""

_NOT_OVER_PARTS = ("s_aux", "sinks", "position_bias", "head_mask")
"""Arguments of an attention function that change its result in ways `attend` does not know."""


@dataclass(frozen=True, slots=True)
class RowParts:
    """One row's keys and values in one layer, for one forward pass."""

    parts: list[Part]
    """All that its queries may see, in order."""
    first_query: int
    """Queries before it are padding, and get zeros."""
    first_column: int
    """The column of the mask that stands for the first token of `parts`."""


class RowStates:
    """Stands for a layer's keys, or values, between `update` and the attention function; nothing else may touch it."""

    def __init__(self, rows: list[RowParts]) -> None:
        self.rows = rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Whatever torch is asked to do with it."""
        raise EngineUnsupported(_OWN_ATTENTION)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise EngineUnsupported(_OWN_ATTENTION)


_OWN_ATTENTION = (
    "this model computes its attention by itself, not through transformers' attention functions: with kvd it can have "
    "one sequence at a time, without padding, in a pool in host memory"
)


def switch_attention(model: PreTrainedModel) -> Callable[[], None]:
    """Has the model attend row by row where it meets `RowStates`; what is returned undoes it.

    Raises `EngineUnsupported` unless it computes with sdpa or eager attention.
    """
    config = decoder_config(model)
    before = config._attn_implementation
    name = NAME_BY_IMPLEMENTATION.get(before)
    if name is None:
        raise EngineUnsupported(
            f"batches, beams and padding over kvd need sdpa or eager attention; this model has {before!r}: load it "
            f'with attn_implementation="sdpa"'
        )
    # Not through the property: it would tell sub-configurations of other towers too.
    config._attn_implementation_internal = name

    def undo() -> None:
        if config._attn_implementation_internal == name:
            config._attn_implementation_internal = before

    return undo


def _forward(original: Callable[..., Any], with_weights: bool) -> Callable[..., Any]:
    def forward(
        module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(key, RowStates):
            result: tuple[torch.Tensor, torch.Tensor | None] = original(
                module, query, key, value, attention_mask, **kwargs
            )
            return result
        if not isinstance(value, RowStates) or len(key.rows) != query.shape[0]:
            raise EngineUnsupported(_OWN_ATTENTION)
        outputs, weights = [], []
        for number, row in enumerate(key.rows):
            output, weight = _one_row(
                original, module, query[number : number + 1], row, _row_mask(attention_mask, number, row), kwargs
            )
            outputs.append(output)
            weights.append(weight)
        if not with_weights or len(weights) > 1:
            return torch.cat(outputs), None
        return torch.cat(outputs), weights[0]

    return forward


def _row_mask(mask: Any, number: int, row: RowParts) -> torch.Tensor | None:
    """[1, 1 or heads, queries, tokens of the row]."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        raise EngineUnsupported("a custom attention mask over a KvdCache: pass a 2D mask, or none")
    num_tokens = sum(keys.shape[1] for keys, _ in row.parts)
    own = mask[number : number + 1] if mask.shape[0] > 1 else mask
    return own[:, :, row.first_query :, row.first_column : row.first_column + num_tokens]


def _one_row(
    original: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    row: RowParts,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [1, queries, heads, head_dim] and weights of one row; zeros for its padding."""
    num_queries = query.shape[2]
    if row.first_query >= num_queries:
        return query.new_zeros(1, num_queries, query.shape[1], query.shape[3]), None
    real = query[:, :, row.first_query :]
    weights: torch.Tensor | None
    if len(row.parts) == 1:
        keys, values = row.parts[0]
        output, weights = original(module, real, keys[None], values[None], mask, **kwargs)
    else:
        output, weights = _over_parts(module, real, row.parts, mask, kwargs)
    if row.first_query:
        padding = output.new_zeros(1, row.first_query, *output.shape[2:])
        return torch.cat([padding, output], dim=1), None
    return output, weights


def _over_parts(
    module: torch.nn.Module, query: torch.Tensor, parts: list[Part], mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    for name in _NOT_OVER_PARTS:
        if kwargs.get(name) is not None:
            raise EngineUnsupported(f"attention with {name} over a sequence in two parts; use materialize=True")
    scaling = kwargs.get("scaling")
    is_causal = kwargs.get("is_causal")
    output, weights = attend(
        query[0],
        parts,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=None if mask is None else mask[0],
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        softcap=kwargs.get("softcap"),
        with_weights=bool(kwargs.get("output_attentions")),
    )
    return output.transpose(0, 1).contiguous()[None], None if weights is None else weights[None]


def _own_eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of the model's own file, which transformers keeps out of its registry."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise EngineUnsupported(f"{type(module).__name__} has no eager attention function")
    return function(module, *args, **kwargs)


AttentionInterface.register(NAME_BY_IMPLEMENTATION["sdpa"], _forward(sdpa_attention_forward, with_weights=False))
AttentionInterface.register(NAME_BY_IMPLEMENTATION["eager"], _forward(_own_eager, with_weights=True))
AttentionMaskInterface.register(NAME_BY_IMPLEMENTATION["sdpa"], sdpa_mask)
AttentionMaskInterface.register(NAME_BY_IMPLEMENTATION["eager"], eager_mask)
