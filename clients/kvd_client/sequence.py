"""`Sequence`: the KV of one growing list of tokens, partly shared, partly this process's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvd_client.core.sequence_core import SequenceCore
from kvd_client.core.verb import Tokens
from kvd_client.memory.device_order import Stream
from kvd_client.sequence_view import SequenceView
from kvd_client.transport.blocking import Runner

if TYPE_CHECKING:
    import torch


class Sequence(SequenceView):
    """A sequence driven by blocking calls; a context manager. Made by `Cache.sequence`, `allocate_sequence` and `fork`.

    One thread at a time: calls that change it exclude each other. Tensors over it may live longer than it does; their
    bytes stay right, and the daemon keeps the blocks until the last of them dies. A sequence that is dropped without
    `close` is closed by the garbage collector.
    """

    def __init__(self, runner: Runner, core: SequenceCore) -> None:
        super().__init__(core)
        self._runner = runner
        self._exclusive = threading.RLock()

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the next tokens of one layer, in place behind what that layer holds; reserves room when there is none.

        `keys` and `values` are [num_kv_heads, n, head_dim] of the layout's dtype, on any device. Every layer advances
        by itself; `num_tokens` counts what all of them hold. Raises `SequenceTooLong` beyond `max_tokens`,
        `OutOfBlocks`, `QuotaExceeded`, `OutOfMemory`, `InvalidRequest` (a wrong shape or dtype), all before anything
        is written.
        """
        with self._alone():
            wanted = self._core.check_append(layer, keys, values)
            if wanted > self._core.capacity_tokens:
                self._runner.drive(self._core.extend(wanted))
            self._core.write(layer, keys, values)

    def extend(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens in all, and some ahead; never waits for another session.

        Raises as `append`.
        """
        with self._alone():
            self._runner.drive(self._core.extend(num_tokens))

    def commit(self, token_ids: Tokens | None = None, *, stream: Stream | None = None) -> int:
        """Publishes every full block whose tokens are named and written in all layers; returns how many tokens are
        sealed.

        `token_ids`, if given, are all ids of the sequence so far; those already known must be equal (`InvalidTokens`).
        Sealed blocks are read-only from then on. Where another process sealed the same block first, that one takes the
        place of ours as soon as no tensor lives over this sequence. Raises `DaemonRestarted`.

        On a card it waits first until what was queued on `stream` is done, or on torch's current stream: what others
        find must be there. Name the stream if another one than this thread's current wrote. Raises `CudaDeviceLost`.
        """
        with self._alone():
            return self._runner.drive(self._core.commit(token_ids, stream))

    def truncate(self, num_tokens: int) -> None:
        """Forgets every token from `num_tokens` on. Tensors that live keep their bytes.

        A cut inside a sealed block copies the part that stays into a block of our own. Raises `InvalidRequest` when
        there are fewer tokens, `OutOfBlocks` (nothing is changed then).
        """
        with self._alone():
            self._runner.drive(self._core.truncate(num_tokens))

    def fork(self, max_tokens: int | None = None) -> Sequence:
        """Another sequence with the same tokens: sealed blocks are shared by reference, the rest is copied at once.

        Full blocks that can be sealed are sealed first. Raises `OutOfBlocks`, `QuotaExceeded`.
        """
        with self._alone():
            core = self._runner.drive(self._core.fork(max_tokens))
            try:
                return Sequence(self._runner, core)
            except BaseException:
                core.close()
                raise

    def get_or_compute(
        self, layer: int, compute_layer: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one layer for all named tokens, as `layer` gives them.

        Where tokens are missing, `compute_layer(start, stop)` returns keys and values [num_kv_heads, stop - start,
        head_dim] for tokens start .. stop. When the last layer is complete the full blocks are published.
        """
        start, stop = self._core.missing_tokens(layer)
        if start < stop:
            keys, values = compute_layer(start, stop)
            self.append(layer, keys, values)
            if self.num_tokens >= self._core.num_named_tokens:
                self.commit()
        return self.layer(layer)

    def close(self) -> None:
        """Gives everything back; idempotent. On a card it waits until this process runs nothing on it any more.

        Blocks under tensors that still live go back when the last of them dies.
        """
        with self._alone():
            self._core.close()

    def _alone(self) -> AbstractContextManager[object]:
        # In a forked child whoever held the lock is not there to let go of it, and there is nothing to exclude from.
        return nullcontext() if self._core.link.is_forked else self._exclusive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
