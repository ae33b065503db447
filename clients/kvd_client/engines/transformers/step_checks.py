"""Whether a forward pass is the next step of what a cache holds: its tokens, its mask, its positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvd.errors import EngineUnsupported, InvalidRequest
from kvd_client.engines.transformers.rows import CachedRow


def check_tokens(row: CachedRow, ids: list[int], start: int, stop: int, *, may_go_on: bool) -> list[int]:
    """The ids that are new to the row, of those in columns start .. stop. Raises `InvalidRequest`.

    Without `may_go_on` a pass either stays within the tokens the row was attached for or lies behind them.
    """
    first, last = max(0, start - row.num_padding), max(0, stop - row.num_padding)
    real = ids[len(ids) - (last - first) :]
    known = row.token_ids
    num_known = len(known)
    if row.num_tokens < first:
        raise InvalidRequest("an earlier forward pass over this KvdCache stopped half way; close it and attach again")
    # What is held has names, so first <= num_known from here on.
    if first < num_known < last and not may_go_on:
        # A whole prompt fed to a cache that holds its beginning would end here too.
        raise InvalidRequest(
            f"{last - first} tokens were passed, but {first} of the prompt's {num_known} are cached: "
            f"{num_known - first} are left to compute"
        )
    if known[first:last] != real[: num_known - first]:
        raise InvalidRequest(f"the tokens at {first}..{last} are not those this KvdCache was attached for")
    return real[num_known - first :]


def padding_of(mask: Any, num_rows: int) -> list[int]:
    """How many columns at the left of each row a mask [rows, n] hides; none without a mask."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != num_rows:
        return [0] * num_rows
    padding: list[int] = mask.bool().int().argmax(dim=1).tolist()
    return padding


def check_mask(mask: Any, paddings: Sequence[int], num_columns: int) -> None:
    """Raises `InvalidRequest` or `EngineUnsupported` unless the mask hides just the padding.

    Keys depend on what the mask let their token see, so only a mask that hides no token gives sharable ones.
    """
    if mask is None:
        if any(paddings):
            raise InvalidRequest("the rows of this KvdCache are padded: pass the attention mask of the whole batch")
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise EngineUnsupported("a custom attention mask changes the KV of every later layer: pass a 2D mask, or none")
    if mask.shape[1] != num_columns:
        raise InvalidRequest(
            f"the attention mask covers {mask.shape[1]} tokens, cached and new ones are {num_columns}: pass the mask "
            f"of the whole sequence, or none"
        )
    expected = torch.arange(num_columns, device=mask.device) >= torch.tensor(paddings, device=mask.device)[:, None]
    if not torch.equal(mask.bool(), expected):
        raise InvalidRequest(
            "the attention mask hides tokens, or other padding than this KvdCache was attached with: only padding on "
            "the left, the same at every step, leaves the tokens' KV as it is"
        )


def check_positions(positions: torch.Tensor | None, paddings: Sequence[int], start: int, stop: int) -> None:
    """Raises `InvalidRequest` unless each row's tokens count up from 0; padding may have any position.

    Without positions a model counts columns, which is right where nothing is padded.
    """
    if positions is None:
        if any(paddings):
            raise InvalidRequest(
                "the rows of this KvdCache are padded: pass position_ids that count each row's tokens from 0, as "
                "generate makes them, or their keys would be put at the places of columns"
            )
        return
    columns = torch.arange(start, stop, device=positions.device)
    expected = columns - torch.tensor(paddings, device=positions.device)[:, None]
    right = positions.shape[-1] == stop - start and bool(((positions == expected) | (expected < 0)).all())
    if not right:
        raise InvalidRequest(
            f"the position ids of these tokens must be {start}..{stop} less each row's padding: other ones, or only "
            f"new tokens without the attention mask of the whole sequence, would put their keys at wrong places"
        )
