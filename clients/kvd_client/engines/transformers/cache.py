"""`KvdCache`: a transformers cache whose rows lie in kvd sequences.

Shared prefix and private tail of a row are one mapped range, so a layer's keys are one view, whoever computed them. The
cache checks that every forward pass is the next step of its own tokens (`guard` tells it which tokens those are) before
a byte is written.

Invariant between passes: every layer counts `_num_columns` columns, and a row holds at least the tokens that stand in
them. It may hold more: rows of a batch have found prefixes of their own, and the columns go on from the shortest; what
a row has already is computed again and not written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import torch
from transformers.cache_utils import Cache

from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, KvdError, SequenceTooLong
from kvd_client.engines.transformers.layers import KvdLayer
from kvd_client.engines.transformers.row_attention import RowParts, RowStates
from kvd_client.engines.transformers.rows import CachedRow
from kvd_client.engines.transformers.step_checks import check_mask, check_positions, check_tokens, padding_of
from kvd_client.engines.transformers.support import require_shape
from kvd_client.sequence import Sequence

_FOREIGN_MODEL = (
    "this KvdCache belongs to another model, or the model's own forward was bypassed: attach one cache for each model "
    "and call the model itself"
)
_HALF_WAY = -1
_log = logging.getLogger(__name__)


class Guarded(Protocol):
    """The model a cache was attached for, as far as the cache needs it; `guard.GuardedModel`."""

    windows: list[int | None]
    """Per layer how many tokens it sees, None for all."""

    def put_on(self) -> None:
        """Puts the checks onto the model, which then calls `begin_step` and `end_step`."""

    def take_off(self) -> None:
        """Takes one cache's checks off."""

    def attend_by_rows(self) -> None:
        """Has the model understand `RowStates` until the last cache's checks are taken off."""

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether this is the very module whose KV the cache holds."""

    def is_unchanged(self) -> bool:
        """Whether weights and adapters are still those that the namespace names."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The forward pass under way: columns start .. stop."""

    start: int
    stop: int
    new_ids: list[list[int]]
    """Per row the ids that get their names when it is complete."""
    began_s: float


class KvdCache(Cache):  # type: ignore[misc]
    """The KV of one sequence, or of a batch, of one model, for `generate(input_ids, cache=...)`. Made by `attach`; a
    context manager.

    Every row is a sequence of its own. `copy.copy`, `copy.deepcopy`, beams and num_return_sequences fork rows: the copy
    shares the sealed blocks and owns its tail. After `generate` it holds one token fewer than the sequences that came
    back, since nothing was computed for the last one. One thread at a time.
    """

    def __init__(
        self,
        sequences: Sequence | Ordered[Sequence],
        model: Guarded,
        *,
        paddings: Ordered[int] | None = None,
        publish: bool = True,
    ) -> None:
        """Puts the checks onto `model`. With `publish` every step that completes a block commits it.

        `paddings` are the columns of padding before each row.
        """
        rows = [sequences] if isinstance(sequences, Sequence) else list(sequences)
        self._start(
            [CachedRow(row, padding) for row, padding in zip(rows, paddings or [0] * len(rows), strict=True)],
            model,
            publish=publish,
        )

    def _start(self, rows: list[CachedRow], model: Guarded, *, publish: bool) -> None:
        layout = rows[0].sequence.layout
        windows = model.windows
        super().__init__(layers=[KvdLayer(self, index, windows[index]) for index in range(layout.num_layers)])
        self.rows = rows
        self.publish_error: KvdError | None = None
        self._layout = layout
        self._publish = publish
        self._model = model
        self._step: _Step | None = None
        self._num_columns = min(row.num_padding + row.num_tokens for row in rows)
        self._layer_columns = [self._num_columns] * layout.num_layers
        self._num_cached_tokens = sum(row.sequence.num_cached_tokens for row in rows)
        self._device = rows[0].device
        self._is_recording = False
        self._cuts_next_input = False
        self._is_guarded = True
        model.put_on()

    def __repr__(self) -> str:
        if self.is_closed:
            return "KvdCache(closed)"
        rows = f"{len(self.rows)} rows, " if len(self.rows) > 1 else ""
        return f"KvdCache({rows}{self._num_columns} tokens, {self.num_cached_tokens} of them found)"

    @property
    def sequence(self) -> Sequence:
        """The sequence of the only row. Raises `InvalidRequest` where there are several: see `rows`."""
        if len(self.rows) != 1:
            raise InvalidRequest(f"this KvdCache holds {len(self.rows)} sequences: look at rows[i].sequence")
        return self.rows[0].sequence

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or the client was closed."""
        return any(row.is_closed for row in self.rows)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were found and not computed, all rows together: in each a multiple of
        block_tokens, at most the prompt - 1.
        """
        return min(self._num_cached_tokens, sum(row.num_tokens for row in self.rows)) if not self.is_closed else 0

    @property
    def num_copied_bytes(self) -> int:
        """Bytes that attaching and forking copied; 0 where everything was mapped."""
        return sum(row.num_copied_bytes for row in self.rows)

    @property
    def num_columns(self) -> int:
        """Padding and tokens in every layer, of forward passes that are complete."""
        return self._num_columns

    def num_columns_in(self, index: int) -> int:
        """Padding and tokens in one layer, written by a pass that may still be under way."""
        return self._layer_columns[index]

    def commit(self) -> int:
        """Publishes every full block computed so far and returns how many tokens are published, all rows together. With
        `publish` (the default) each step has done so already; an error it met then is raised here.
        """
        if self.publish_error is not None:
            raise self.publish_error
        return sum(row.commit() for row in self.rows)

    def close(self) -> None:
        """Gives everything back and takes the checks off the model; idempotent."""
        if self._is_guarded:
            self._is_guarded = False
            self._model.take_off()
        for row in self.rows:
            row.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require_prompt(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raises `InvalidRequest` unless `input_ids` [rows, n] are whole sequences that begin with what is held here.

        `mask` [rows, n], or None for no padding.
        """
        num_ids = input_ids.shape[1]
        if self._num_columns >= num_ids:
            raise InvalidRequest(
                f"the cache holds {self._num_columns} tokens and input_ids has {num_ids}: pass the whole sequence with "
                f"at least one token more than the cache (after generate: its output and what follows)"
            )
        if self._num_columns and mask is not None:
            check_mask(mask, [row.num_padding for row in self.rows], num_ids)
        for row, ids in zip(self.rows, input_ids.tolist(), strict=True):
            known, own = row.token_ids, ids[row.num_padding :]
            num_held = row.num_tokens
            num_common = min(num_held, len(own))
            matching = next((at for at in range(num_common) if known[at] != own[at]), num_common)
            if matching < num_held:
                raise InvalidRequest(
                    f"this KvdCache holds other tokens than input_ids: the sequence holds {num_held} tokens; only the "
                    f"first {matching} are the prompt's"
                )

    def require_room(self, num_ids: int, num_new: int) -> None:
        """Raises `SequenceTooLong` unless `num_new` tokens fit behind `num_ids` columns; the last is not computed."""
        for row in self.rows:
            num_total = num_ids - row.num_padding
            if num_total + num_new - 1 > row.sequence.max_tokens:
                raise SequenceTooLong(
                    f"{num_total} tokens and {num_new} new ones need attach(..., max_tokens={num_total + num_new}); "
                    f"this cache was attached for {row.sequence.max_tokens}"
                )

    def begin_step(
        self,
        decoder: torch.nn.Module,
        input_ids: torch.Tensor,
        mask: Any = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Takes the tokens [rows, n] of the forward pass that starts now. Raises `InvalidRequest`, `EngineUnsupported`,
        `SequenceTooLong` or `ClientClosed`, with nothing changed, unless they are what comes next.

        `mask` is the pass's attention mask, `positions` its position ids [..., n], if it has any.
        """
        self.require_open()
        if not self._model.is_decoder(decoder):
            raise EngineUnsupported(_FOREIGN_MODEL)
        self._require_rows(input_ids)
        start, stop = self._num_columns, self._num_columns + input_ids.shape[1]
        if any(columns != start for columns in self._layer_columns):
            raise InvalidRequest(
                "an earlier forward pass over this KvdCache stopped half way; close it and attach again"
            )
        if not start and not any(row.token_ids for row in self.rows):
            self._adopt_padding(mask)
        paddings = [row.num_padding for row in self.rows]
        check_mask(mask, paddings, stop)
        new_ids = [
            check_tokens(row, ids, start, stop, may_go_on=self._is_recording)
            for row, ids in zip(self.rows, input_ids.tolist(), strict=True)
        ]
        check_positions(positions, paddings, start, stop)
        self.require_room(stop, 1)
        # Half a millisecond for hundreds of tensors: too much for every generated token.
        if stop - start > 1 and not self._model.is_unchanged():
            raise EngineUnsupported(
                "the model's weights or adapters changed since this KvdCache was attached; close it and attach again"
            )
        if len(self.rows) > 1 or any(paddings):
            self._model.attend_by_rows()
        self._step = _Step(start, stop, new_ids, time.monotonic())

    def _require_rows(self, input_ids: torch.Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.shape[0] != len(self.rows):
            holds = "one sequence" if len(self.rows) == 1 else f"{len(self.rows)} sequences"
            raise EngineUnsupported(
                f"input_ids of shape {list(input_ids.shape)} over a cache of {holds}: attach with the whole batch, or "
                f"repeat its rows with batch_repeat_interleave"
            )

    def _adopt_padding(self, mask: Any) -> None:
        """An empty cache learns where its rows begin from the first mask it meets."""
        for row, padding in zip(self.rows, padding_of(mask, len(self.rows)), strict=True):
            row.num_padding = padding

    def end_step(self) -> None:
        """The forward pass is complete: its tokens get their names, and blocks that became full are published."""
        step, self._step = self._step, None
        if step is None:
            return
        for index, columns in enumerate(self._layer_columns):
            if columns != step.stop:
                raise EngineUnsupported(f"the forward pass did not use layer {index} of the cache")
        row_s = (time.monotonic() - step.began_s) / len(self.rows)
        for row, ids in zip(self.rows, step.new_ids, strict=True):
            if ids:
                row.add_tokens(ids)
            row.computed(min(step.stop - step.start, row.num_tokens), row_s)
        # Not before every token has its name, or those that follow would get the names of others.
        self._num_columns = step.stop
        if not self._is_recording:
            self._publish_blocks()

    def require_open(self) -> None:
        """Raises `ClientClosed` after `close`."""
        if self.is_closed:
            raise ClientClosed("this KvdCache was closed; attach again")

    def _publish_blocks(self) -> None:
        for row in self.rows:
            if self.publish_error is None and row.failure is not None:
                self.publish_error = row.failure
            if not self._publish or self.publish_error is not None or not row.has_full_blocks_to_publish:
                continue
            try:
                row.commit()
            except KvdError as error:
                # What is mapped stays good without the daemon, so a generation under way goes on.
                self.publish_error = error
                _log.warning("kvd: these blocks are not published: %s", error)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the step's keys and values [rows, num_kv_heads, n, head_dim] of one layer."""
        self.require_open()
        step = self._step
        if step is None:
            raise EngineUnsupported(_FOREIGN_MODEL)
        require_shape(self._layout, keys, values, num_rows=len(self.rows), device=self._device)
        if self._layer_columns[index] != step.start or keys.shape[2] != step.stop - step.start:
            raise EngineUnsupported(f"layer {index} wrote twice, or other tokens than the pass was given")
        # Until all rows have it: what stops in between must not pass for a layer that has none of this step.
        self._layer_columns[index] = _HALF_WAY
        for number, row in enumerate(self.rows):
            first_new = row.num_padding + row.num_tokens_in(index) - step.start
            if first_new < keys.shape[2]:
                row.write(index, keys[number, :, first_new:], values[number, :, first_new:])
        self._layer_columns[index] = step.stop

    def step_states(self, index: int, first_column: int) -> tuple[Any, Any]:
        """What the step under way attends to in one layer, from `first_column` on: keys and values as views [1,
        num_kv_heads, tokens, head_dim], or `RowStates` where no single tensor shows them.
        """
        step = self._step
        if step is None:
            raise EngineUnsupported(_FOREIGN_MODEL)
        parts = [row.between(index, first_column - row.num_padding, step.stop - row.num_padding) for row in self.rows]
        if len(parts) == 1 and len(parts[0]) == 1 and not self.rows[0].num_padding:
            keys, values = parts[0][0]
            return keys[None], values[None]
        self._model.attend_by_rows()
        states = RowStates(
            [
                RowParts(
                    row_parts,
                    first_query=max(0, row.num_padding - step.start),
                    first_column=max(0, row.num_padding - first_column),
                )
                for row, row_parts in zip(self.rows, parts, strict=True)
            ]
        )
        return states, states

    def layer_states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, views [1, num_kv_heads, tokens, head_dim]. Raises `EngineUnsupported`."""
        parts = [row.parts(index) for row in self.rows]
        if len(parts) != 1 or len(parts[0]) != 1:
            raise EngineUnsupported(
                f"layer {index} of this KvdCache lies in several tensors: look at rows[i].parts({index})"
            )
        keys, values = parts[0][0]
        return keys[None], values[None]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. Raises `InvalidRequest` for a positive count, or too many."""
        num_left = self._num_columns + tokens_to_remove
        if tokens_to_remove > 0 or num_left < 0:
            raise InvalidRequest(
                f"crop takes the number of tokens to remove as -{self._num_columns} .. 0, not {tokens_to_remove}"
            )
        if tokens_to_remove:
            for row in self.rows:
                row.truncate(max(0, num_left - row.num_padding))
            self._num_columns = num_left
            self._layer_columns = [num_left] * len(self._layer_columns)
        # What assisted decoding proposed and threw away is cut off by now.
        self._publish_blocks()

    def align(self, input_ids: torch.Tensor | Ordered[int]) -> int:
        """Crops to what is held of `input_ids` ([1, n] or n ids, one row), all but its last token at most; returns how
        many tokens are left. For a conversation whose next turn renders the earlier ones a little differently.
        """
        ids = torch.as_tensor(input_ids).reshape(-1).tolist()
        known = self.sequence.token_ids[: self._num_columns]
        longest = min(len(known), len(ids) - 1)
        num_left = next((at for at in range(longest) if known[at] != ids[at]), max(0, longest))
        self.crop(num_left - self._num_columns)
        return num_left

    def reset(self) -> None:
        """Removes every token, and forgets the padding."""
        self.crop(-self._num_columns)
        for row in self.rows:
            row.truncate(0)
            row.num_padding = 0

    def fork(self) -> KvdCache:
        """Another cache with the same tokens: sealed blocks are shared, the rest is copied at once."""
        return self._with_rows(_forked(self.rows, range(len(self.rows))))

    def repeated(self, repeats: int) -> KvdCache:
        """Another cache with every row `repeats` times, one after the other: forks, as in `fork`."""
        return self._with_rows(_forked(self.rows, [at for at in range(len(self.rows)) for _ in range(repeats)]))

    def _with_rows(self, rows: list[CachedRow]) -> KvdCache:
        twin = KvdCache.__new__(KvdCache)
        twin._start(rows, self._model, publish=self._publish)
        twin._num_columns = self._num_columns
        twin._layer_columns = list(self._layer_columns)
        return twin

    def __copy__(self) -> KvdCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KvdCache:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise EngineUnsupported(
            "a KvdCache is memory of this process and cannot be pickled; attach in the other process"
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] is: moved where nobody else wants it, else forked."""
        self._pick(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other: forked, so that the sealed blocks are there once."""
        self._pick([number for number in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows, in this order; a mask of bools selects as well."""
        chosen = indices.nonzero().flatten() if indices.dtype is torch.bool else indices
        self._pick(chosen.tolist())

    def _pick(self, wanted: list[int]) -> None:
        """All or nothing. Raises `InvalidRequest` for a row there is not, or none at all."""
        if not wanted or not all(0 <= number < len(self.rows) for number in wanted):
            raise InvalidRequest(f"rows {wanted} of {len(self.rows)}")
        again = [place for place, number in enumerate(wanted) if number in wanted[:place]]
        forks = _forked(self.rows, [wanted[place] for place in again])
        picked = [self.rows[number] for number in wanted]
        for place, fork in zip(again, forks, strict=True):
            picked[place] = fork
        unwanted = [row for number, row in enumerate(self.rows) if number not in wanted]
        self.rows = picked
        for row in unwanted:
            row.close()

    def activate_past_recording(self) -> None:
        """Assisted decoding asks for this before its first step. Nothing is published before the `crop` that says which
        tokens stay; and that first step is given the whole prompt, of which the cached part is cut off again.
        """
        self._is_recording = True
        self._cuts_next_input = True

    def end_recording(self) -> None:
        """After `generate`: back to publishing step by step."""
        if self._is_recording:
            self._is_recording = self._cuts_next_input = False
            if not self.is_closed:
                self._publish_blocks()

    def num_columns_to_cut(self, positions: torch.Tensor | None) -> int:
        """How many leading columns of the model's next input the cache holds already, asked once before each call."""
        cuts, self._cuts_next_input = self._cuts_next_input, False
        whole = positions is not None and positions.shape[-1] > self._num_columns and not positions[..., 0].any()
        return self._num_columns if cuts and whole else 0


def _forked(rows: list[CachedRow], numbers: Ordered[int]) -> list[CachedRow]:
    """All or none."""
    forks: list[CachedRow] = []
    try:
        forks.extend(rows[number].fork() for number in numbers)
    except BaseException:
        for fork in forks:
            fork.close()
        raise
    return forks
