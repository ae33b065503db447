"""How long a begin takes: one that has to ask the tiers below, beside one that never does."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import kvd_client
from kvd.errors import OutOfBlocks
from tests.soak.content import LAYOUT, MODEL

_NUM_TOKENS = 8 * LAYOUT.block_tokens + 1


class Probe:
    """Two kinds of begin in turn, over prompts that nobody else uses: neither ever waits for another process."""

    def __init__(self, folder: Path) -> None:
        self.longest_below_s = self.longest_resident_s = 0.0
        self._client = kvd_client.connect(folder, label="probe")
        self._cache = self._client.cache(model=MODEL, layout=LAYOUT, salt="probe")
        self._first_tokens = itertools.count(1 << 20)
        self._resident = [7] * _NUM_TOKENS
        self._held = self._cache.sequence(self._resident)
        self._held.advance(_NUM_TOKENS)
        self._held.commit()

    def measure(self) -> None:
        """One begin of each kind: a prompt never seen, which must be asked for below, and one that is held resident."""
        unseen = [next(self._first_tokens)] * _NUM_TOKENS
        self.longest_below_s = max(self.longest_below_s, self._begin_s(unseen))
        self.longest_resident_s = max(self.longest_resident_s, self._begin_s(self._resident))

    def _begin_s(self, token_ids: list[int]) -> float:
        start = time.monotonic()
        try:
            self._cache.sequence(token_ids, announce=False).close()
        except OutOfBlocks:
            return 0.0  # everything is held just now; that is no matter of Redis
        return time.monotonic() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        self._client.close()
