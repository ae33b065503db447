"""Whether what a cache is given goes on from what it holds: the prompt of a `generate`, and of each forward pass the
tokens, the mask and the positions. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvd.errors import EngineUnsupported, InvalidRequest, SequenceTooLong
from kvd_client.engines.transformers.rows import CachedRow

STOPPED_HALF_WAY = "an earlier forward pass over this KvdCache stopped half way; close it and attach again"


def check_beginning(
    rows: Sequence[CachedRow], num_columns: int, input_ids: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Raises `InvalidRequest` unless `input_ids` [rows, n] are whole sequences that begin with what the rows hold.

    `num_columns` are the columns held, `mask` is [rows, n], or None for no padding.
    """
    num_ids = input_ids.shape[1]
    if num_columns >= num_ids:
        raise InvalidRequest(
            f"the cache holds {num_columns} tokens and input_ids has {num_ids}: pass the whole sequence with "
            f"at least one token more than the cache (after generate: its output and what follows)"
        )
    if num_columns and mask is not None:
        check_mask(mask, [row.num_padding for row in rows], num_ids)
    for row, ids in zip(rows, input_ids.tolist(), strict=True):
        known, own = row.token_ids, ids[row.num_padding :]
        num_held = row.num_tokens
        num_common = min(num_held, len(own))
        matching = next((at for at in range(num_common) if known[at] != own[at]), num_common)
        if matching < num_held:
            raise InvalidRequest(
                f"this KvdCache holds other tokens than input_ids: the sequence holds {num_held} tokens; only the "
                f"first {matching} are the prompt's"
            )


def check_room(rows: Sequence[CachedRow], paddings: Sequence[int], num_columns: int, num_new: int) -> None:
    """Raises `SequenceTooLong` unless `num_new` tokens fit behind `num_columns` columns; the last is not computed."""
    for row, padding in zip(rows, paddings, strict=True):
        num_total = num_columns - padding
        if num_total + num_new - 1 > row.sequence.max_tokens:
            raise SequenceTooLong(
                f"{num_total} tokens and {num_new} new ones need attach(..., max_tokens={num_total + num_new}); "
                f"this cache was attached for {row.sequence.max_tokens}"
            )


def check_num_rows(input_ids: torch.Tensor, num_rows: int) -> None:
    """Raises `EngineUnsupported` unless `input_ids` are [num_rows, n]."""
    if input_ids.dim() != 2 or input_ids.shape[0] != num_rows:
        holds = "one sequence" if num_rows == 1 else f"{num_rows} sequences"
        raise EngineUnsupported(
            f"input_ids of shape {list(input_ids.shape)} over a cache of {holds}: attach with the whole batch, or "
            f"repeat its rows with batch_repeat_interleave"
        )


def check_step(
    rows: Sequence[CachedRow],
    paddings: Sequence[int],
    start: int,
    input_ids: torch.Tensor,
    mask: Any,
    positions: torch.Tensor | None,
    *,
    may_go_on: bool,
) -> list[list[int]]:
    """All that is to be seen of a forward pass over `input_ids` [rows, n] from column `start` on; returns per row the
    ids that are new to it. Raises `InvalidRequest`, `EngineUnsupported` or `SequenceTooLong`.
    """
    stop = start + input_ids.shape[1]
    check_mask(mask, paddings, stop)
    new_ids = [
        check_tokens(row, ids, max(0, start - padding), max(0, stop - padding), may_go_on=may_go_on)
        for row, padding, ids in zip(rows, paddings, input_ids.tolist(), strict=True)
    ]
    check_positions(positions, paddings, start, stop)
    check_room(rows, paddings, stop, 1)
    return new_ids


def check_tokens(row: CachedRow, ids: list[int], first: int, last: int, *, may_go_on: bool) -> list[int]:
    """The ids that are new to the row, of its tokens first .. last, with which `ids` end. Raises `InvalidRequest`.

    Without `may_go_on` a pass either stays within the tokens the row was attached for or lies behind them.
    """
    real = ids[len(ids) - (last - first) :]
    known = row.token_ids
    num_known = len(known)
    if row.num_tokens < first:
        raise InvalidRequest(STOPPED_HALF_WAY)
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
