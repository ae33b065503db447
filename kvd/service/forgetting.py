"""Makes single blocks unfindable, here and below, as far as that can be had without a generation of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.block import ChainHash
from kvd.mover import Drop, Mover, Spill
from kvd.service.sessions import Cache
from kvd.service.spilling import Spilling
from kvd.tiers.base import TierKey


class Forgetting:
    """Loop thread only.

    The pool forgets first, so no new copy down begins; a copy that is under way cannot be taken back, and what it
    stores is forgotten once it has ended. Not final as a flush is: a tier that is down is told nothing later.
    """

    def __init__(self, mover: Mover, spilling: Spilling) -> None:
        self._mover = mover
        self._spilling = spilling
        self._doomed: set[TierKey] = set()
        """Forgotten while they were being copied down."""
        spilling.on_copied = self._copied

    def forget(self, cache: Cache, hashes: Sequence[ChainHash], on_done: Callable[[], None]) -> int:
        """How many blocks left the pool; `on_done` is called when the tiers were told, or could not be."""
        num_blocks = cache.pool.forget(cache.namespace, hashes)
        self._doomed |= {job.key for job in self._spilling.being_copied(cache.pool, set(hashes))}
        self._mover.submit([Drop([TierKey(cache.digest, one) for one in hashes], lambda _job: on_done())])
        return num_blocks

    def _copied(self, job: Spill) -> None:
        if job.key in self._doomed:
            self._doomed.discard(job.key)
            self._mover.submit([Drop([job.key], _ignore)])


def _ignore(_job: Drop) -> None:
    """Nobody waits for it."""
