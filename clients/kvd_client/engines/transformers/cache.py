"""`KvdCache`: a transformers cache whose rows lie in kvd sequences.

Shared prefix and private tail of a row are one mapped range, so a layer's keys are one view, whoever computed them. The
cache checks that every forward pass is the next step of its own tokens (`guard` tells it which tokens those are) before
a byte is written, has its `Batch` write it, and publishes what became full.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ordered
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from transformers.cache_utils import Cache

from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, KvdError
from kvd_client.engines.transformers.batch import Batch
from kvd_client.engines.transformers.guarded import FOREIGN_MODEL, Guarded
from kvd_client.engines.transformers.layers import KvdLayer
from kvd_client.engines.transformers.row_attention import RowStates
from kvd_client.engines.transformers.row_selection import repeated
from kvd_client.engines.transformers.rows import CachedRow
from kvd_client.engines.transformers.step_checks import check_num_rows, check_step, padding_of
from kvd_client.sequence import Sequence

_log = logging.getLogger(__name__)


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
        paddings = paddings or [0] * len(rows)
        self._start(
            Batch([CachedRow(row, padding) for row, padding in zip(rows, paddings, strict=True)]),
            model,
            publish=publish,
        )

    def _start(self, batch: Batch, model: Guarded, *, publish: bool) -> None:
        windows = model.windows
        num_layers = batch.rows[0].sequence.layout.num_layers
        super().__init__(layers=[KvdLayer(self, index, windows[index]) for index in range(num_layers)])
        self.publish_error: KvdError | None = None
        self._batch = batch
        self._publish = publish
        self._model = model
        self._num_cached_tokens = sum(row.sequence.num_cached_tokens for row in batch.rows)
        self._is_recording = False
        self._cuts_next_input = False
        self._is_guarded = True
        model.put_on()

    def __repr__(self) -> str:
        if self.is_closed:
            return "KvdCache(closed)"
        rows = f"{len(self.rows)} rows, " if len(self.rows) > 1 else ""
        return f"KvdCache({rows}{self.num_columns} tokens, {self.num_cached_tokens} of them found)"

    @property
    def rows(self) -> list[CachedRow]:
        """The rows of the batch in order, one where there is no batch."""
        return self._batch.rows

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
        return self._batch.num_columns

    def num_columns_in(self, index: int) -> int:
        """Padding and tokens in one layer, written by a pass that may still be under way."""
        return self._batch.num_columns_in(index)

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
            raise EngineUnsupported(FOREIGN_MODEL)
        check_num_rows(input_ids, len(self.rows))
        self._batch.require_complete()
        paddings = self.paddings_under(mask)
        new_ids = check_step(
            self.rows, paddings, self.num_columns, input_ids, mask, positions, may_go_on=self._is_recording
        )
        # Half a millisecond for hundreds of tensors: too much for every generated token.
        if input_ids.shape[1] > 1 and not self._model.is_unchanged():
            raise EngineUnsupported(
                "the model's weights or adapters changed since this KvdCache was attached; close it and attach again"
            )
        if len(self.rows) > 1 or any(paddings):
            self._model.attend_by_rows()
        for row, padding in zip(self.rows, paddings, strict=True):
            row.num_padding = padding
        self._batch.begin_pass(input_ids.shape[1], new_ids)

    def paddings_under(self, mask: Any) -> list[int]:
        """Columns of padding before each row. An empty cache learns them from the mask of the first step it takes."""
        if not self.num_columns and not any(row.token_ids for row in self.rows):
            return padding_of(mask, len(self.rows))
        return [row.num_padding for row in self.rows]

    def end_step(self) -> None:
        """The forward pass is complete: its tokens get their names, and blocks that became full are published."""
        if self._batch.is_in_pass:
            self._batch.end_pass()
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
        self._batch.write(index, keys, values)

    def step_states(self, index: int, first_column: int) -> tuple[Any, Any]:
        """What the step under way attends to in one layer, from `first_column` on: keys and values as views [1,
        num_kv_heads, tokens, head_dim], or `RowStates` where no single tensor shows them.
        """
        rows = self._batch.attended(index, first_column)
        if len(rows) == 1 and len(rows[0].parts) == 1 and not self.rows[0].num_padding:
            keys, values = rows[0].parts[0]
            return keys[None], values[None]
        self._model.attend_by_rows()
        states = RowStates(rows)
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
        num_left = self.num_columns + tokens_to_remove
        if tokens_to_remove > 0 or num_left < 0:
            raise InvalidRequest(
                f"crop takes the number of tokens to remove as -{self.num_columns} .. 0, not {tokens_to_remove}"
            )
        if tokens_to_remove:
            self._batch.truncate(num_left)
        # What assisted decoding proposed and threw away is cut off by now.
        self._publish_blocks()

    def align(self, input_ids: torch.Tensor | Ordered[int]) -> int:
        """Crops to what is held of `input_ids` ([1, n] or n ids, one row), all but its last token at most; returns how
        many tokens are left. For a conversation whose next turn renders the earlier ones a little differently.
        """
        ids = torch.as_tensor(input_ids).reshape(-1).tolist()
        known = self.sequence.token_ids[: self.num_columns]
        longest = min(len(known), len(ids) - 1)
        num_left = next((at for at in range(longest) if known[at] != ids[at]), max(0, longest))
        self.crop(num_left - self.num_columns)
        return num_left

    def reset(self) -> None:
        """Removes every token, and forgets the padding."""
        self.crop(-self.num_columns)
        for row in self.rows:
            row.truncate(0)
            row.num_padding = 0

    def fork(self) -> KvdCache:
        """Another cache with the same tokens: sealed blocks are shared, the rest is copied at once."""
        return self._twin(range(len(self.rows)))

    def repeated(self, repeats: int) -> KvdCache:
        """Another cache with every row `repeats` times, one after the other: forks, as in `fork`."""
        return self._twin(repeated(len(self.rows), repeats))

    def _twin(self, numbers: Ordered[int]) -> KvdCache:
        twin, batch = KvdCache.__new__(KvdCache), self._batch.forked(numbers)
        try:
            twin._start(batch, self._model, publish=self._publish)
        except BaseException:
            for row in batch.rows:
                row.close()
            raise
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
        self._batch.pick(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other: forked, so that the sealed blocks are there once."""
        self._batch.pick(repeated(len(self.rows), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows, in this order; a mask of bools selects as well."""
        chosen = indices.nonzero().flatten() if indices.dtype is torch.bool else indices
        self._batch.pick(chosen.tolist())

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
        whole = positions is not None and positions.shape[-1] > self.num_columns and not positions[..., 0].any()
        return self.num_columns if cuts and whole else 0
