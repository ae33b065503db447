"""What the rows about lower tiers share: blocks that lie below and not in memory, and a begin that brings them up."""

from __future__ import annotations

import time

import kvd_client
from kvd.bench.row import CannotMeasure
from kvd.bench.shapes import TWO_MIB, prompt
from kvd.bench.writer import seal_prompt

BRING_UP_BOUND_S = 30.0
LOOK_EVERY_S = 0.002
"""Oftener would take a noticeable share of a core from what is measured."""
POOL = "pool"


class Below:
    """`num_blocks` blocks of 2 MiB of a model of their own, written once and copied down."""

    def __init__(self, client: kvd_client.Client, model: str, num_blocks: int) -> None:
        self._client = client
        self._model = model
        self._num_tokens = num_blocks * TWO_MIB.block_tokens
        self._cache = client.cache(model=model, layout=TWO_MIB)
        self._ids = prompt(num_blocks, self._num_tokens + 1)
        seal_prompt(self._cache, self._ids, b"\1")
        copy_down(client)

    def forget(self) -> None:
        """Has memory forget the blocks; the tiers keep them."""
        self._client.flush(model=self._model, tier=POOL)

    def fetch_s(self) -> float:
        """Seconds from the token ids to a view of all the blocks, when none of them is in memory."""
        self.forget()
        return self.bring_up_s()

    def bring_up_s(self) -> float:
        """The same, when memory has forgotten them already."""
        start = time.perf_counter()
        with self._cache.sequence(self._ids, wait_s=BRING_UP_BOUND_S, populate=False, announce=False) as seq:
            if seq.num_cached_tokens != self._num_tokens:
                raise CannotMeasure(f"only {seq.num_cached_tokens} of {self._num_tokens} tokens came up")
            view = seq.buffer(0, self._num_tokens)
            taken = time.perf_counter() - start
            if view[0] != 1 or view[-1] != 1:
                raise CannotMeasure("other bytes came up than went down")
            view.release()
        return taken


def copy_down(client: kvd_client.Client) -> float:
    """Seconds until every idle block has a copy below."""
    start = time.perf_counter()
    while client.spill():
        if time.perf_counter() - start > BRING_UP_BOUND_S:
            raise CannotMeasure("the blocks are not copied down")
        time.sleep(LOOK_EVERY_S)
    return time.perf_counter() - start
