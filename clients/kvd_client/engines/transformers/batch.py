"""The rows of a cache side by side, in columns: how far every layer is, and the forward pass under way.

Invariant between passes: every layer counts `num_columns` columns, and a row holds at least the tokens that stand in
them. It may hold more: rows of a batch have found prefixes of their own, and the columns go on from the shortest; what
a row has already is computed again and not written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvd.errors import EngineUnsupported, InvalidRequest
from kvd_client.engines.transformers.guarded import FOREIGN_MODEL
from kvd_client.engines.transformers.row_attention import RowParts
from kvd_client.engines.transformers.row_selection import fork_rows, select
from kvd_client.engines.transformers.rows import CachedRow
from kvd_client.engines.transformers.step_checks import STOPPED_HALF_WAY
from kvd_client.engines.transformers.support import require_shape

_HALF_WAY = -1


@dataclass(frozen=True, slots=True)
class _Pass:
    """The forward pass under way: columns start .. stop."""

    start: int
    stop: int
    new_ids: list[list[int]]
    """Per row the ids that get their names when it is complete."""
    began_s: float


class Batch:
    """Padding and tokens of every row. It takes what it is given for the next step: `step_checks` look at that before.

    One thread at a time.
    """

    def __init__(self, rows: list[CachedRow]) -> None:
        self.rows = rows
        self.num_columns = min(row.num_padding + row.num_tokens for row in rows)
        """Of forward passes that are complete."""
        self._layout = rows[0].sequence.layout
        self._device = rows[0].device
        self._layer_columns = [self.num_columns] * self._layout.num_layers
        self._pass: _Pass | None = None

    @property
    def is_in_pass(self) -> bool:
        """Whether a forward pass is under way."""
        return self._pass is not None

    def num_columns_in(self, layer: int) -> int:
        """Columns in one layer, written by a pass that may still be under way."""
        return self._layer_columns[layer]

    def require_complete(self) -> None:
        """Raises `InvalidRequest` when the last pass wrote some layers, or rows, and not all."""
        if any(columns != self.num_columns for columns in self._layer_columns):
            raise InvalidRequest(STOPPED_HALF_WAY)

    def begin_pass(self, num_new_columns: int, new_ids: list[list[int]]) -> None:
        """The layers will write that many columns. `new_ids` are per row the ids among them that have no name yet."""
        self._pass = _Pass(self.num_columns, self.num_columns + num_new_columns, new_ids, time.monotonic())

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the pass's keys and values [rows, num_kv_heads, n, head_dim] of one layer, but for what rows hold
        already. Raises `EngineUnsupported`.
        """
        current = self._current_pass()
        require_shape(self._layout, keys, values, num_rows=len(self.rows), device=self._device)
        if self._layer_columns[layer] != current.start or keys.shape[2] != current.stop - current.start:
            raise EngineUnsupported(f"layer {layer} wrote twice, or other tokens than the pass was given")
        # Until all rows have it: what stops in between must not pass for a layer that has none of this step.
        self._layer_columns[layer] = _HALF_WAY
        for number, row in enumerate(self.rows):
            first_new = row.num_padding + row.num_tokens_in(layer) - current.start
            if first_new < keys.shape[2]:
                row.write(layer, keys[number, :, first_new:], values[number, :, first_new:])
        self._layer_columns[layer] = current.stop

    def attended(self, layer: int, first_column: int) -> list[RowParts]:
        """Per row what the pass attends to in one layer, from `first_column` on. Raises `EngineUnsupported`."""
        current = self._current_pass()
        return [
            RowParts(
                row.between(layer, first_column - row.num_padding, current.stop - row.num_padding),
                first_query=max(0, row.num_padding - current.start),
                first_column=max(0, row.num_padding - first_column),
            )
            for row in self.rows
        ]

    def end_pass(self) -> None:
        """Its tokens get their names. Raises `EngineUnsupported` when a layer has not written."""
        current = self._current_pass()
        self._pass = None
        for layer, columns in enumerate(self._layer_columns):
            if columns != current.stop:
                raise EngineUnsupported(f"the forward pass did not use layer {layer} of the cache")
        row_s = (time.monotonic() - current.began_s) / len(self.rows)
        for row, ids in zip(self.rows, current.new_ids, strict=True):
            if ids:
                row.add_tokens(ids)
            row.computed(min(current.stop - current.start, row.num_tokens), row_s)
        # Not before every token has its name, or those that follow would get the names of others.
        self.num_columns = current.stop

    def _current_pass(self) -> _Pass:
        if self._pass is None:
            raise EngineUnsupported(FOREIGN_MODEL)
        return self._pass

    def truncate(self, num_columns: int) -> None:
        """Forgets the columns from `num_columns` on, and what rows hold behind them."""
        for row in self.rows:
            row.truncate(max(0, num_columns - row.num_padding))
        self.num_columns = num_columns
        self._layer_columns = [num_columns] * len(self._layer_columns)

    def pick(self, wanted: list[int]) -> None:
        """Goes on with these rows in this order and closes the others; see `row_selection.select`."""
        self.rows, unwanted = select(self.rows, wanted)
        for row in unwanted:
            row.close()

    def forked(self, numbers: Sequence[int]) -> Batch:
        """Another batch of forks of these rows, as far as this one."""
        twin = Batch(fork_rows(self.rows, numbers))
        twin.num_columns = self.num_columns
        twin._layer_columns = list(self._layer_columns)
        return twin
