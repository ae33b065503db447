"""The layers of a `KvdCache`, as transformers asks them: what a step attends to, and what it has written."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from kvd.errors import EngineUnsupported

if TYPE_CHECKING:
    from kvd_client.engines.transformers.cache import KvdCache


class KvdLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `KvdCache`. With a `window`, a step sees the last `window` - 1 tokens before it; all are kept.

    transformers counts columns: the padding of a batch, and then tokens.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_initialized = True

    def __init__(self, cache: KvdCache, index: int, window: int | None = None) -> None:
        # Not the base class's: it would assign keys and values, which here are asked for each time, so that no view
        # outlives the forward pass that needed it and keeps a closed sequence mapped.
        self._cache = cast("KvdCache", weakref.proxy(cache))
        self._index = index
        self._window = window
        self.is_sliding = window is not None

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._cache.rows)

    @property
    def keys(self) -> torch.Tensor:
        """A view of the layer's keys. Raises `EngineUnsupported` where no single tensor shows them."""
        return self._cache.layer_states(self._index)[0]

    @property
    def values(self) -> torch.Tensor:
        """A view of the layer's values; as `keys`."""
        return self._cache.layer_states(self._index)[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        """Writes the step's keys and values behind the layer's, in place; returns what the step attends to: views, or
        `RowStates` where no single tensor shows it.
        """
        _, first_column = self.get_mask_sizes(key_states.shape[2])
        self._cache.write(self._index, key_states, value_states)
        return self._cache.step_states(self._index, first_column)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the columns that a step of `query_length` tokens attends to."""
        num_columns = self.get_seq_length()
        offset = 0 if self._window is None else max(0, num_columns - self._window + 1)
        return num_columns + query_length - offset, offset

    def get_seq_length(self) -> int:
        """Columns in this layer."""
        return self._cache.num_columns_in(self._index)

    def get_max_length(self) -> int:
        """Columns that there may ever be."""
        return min(row.num_padding + row.sequence.max_tokens for row in self._cache.rows)

    def _refuse(self, *_arguments: object) -> NoReturn:
        """Refused: `EngineUnsupported`. What concerns tokens or rows concerns every layer of them."""
        raise EngineUnsupported(
            "one layer of a KvdCache cannot be changed or moved by itself: crop, reset and reorder the cache"
        )

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse
