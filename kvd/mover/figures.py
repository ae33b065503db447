"""What the mover has done, for status. Counted by the loop as it takes finished jobs back, so it needs no lock."""

from __future__ import annotations

from collections import Counter

from kvd.errors import BlockMissing, StaleGeneration
from kvd.mover.jobs import Carry, Fill, Flush, Job, Lookup, Spill


class MoverFigures:
    """Counters since the daemon's start."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(
            lookups=0,
            blocks_looked_up=0,
            blocks_found=0,
            promoted=0,
            promoted_nbytes=0,
            failed_promotions=0,
            spilled=0,
            spilled_nbytes=0,
            failed_spills=0,
            stale_spills=0,
            carried=0,
            carried_nbytes=0,
            failed_carries=0,
            flushes=0,
            cancelled=0,
        )

    def took(self, job: Job) -> None:
        """A job came back; its buffers are still there."""
        counts = self.counts
        if job.cancelled:
            counts["cancelled"] += 1
        elif isinstance(job, Lookup):
            counts["lookups"] += 1
            counts["blocks_looked_up"] += len(job.keys)
            counts["blocks_found"] += sum(place is not None for place in job.places)
        elif isinstance(job, Fill):
            if job.error is None:
                counts["promoted"] += 1
                counts["promoted_nbytes"] += job.into.nbytes
            elif not isinstance(job.error, BlockMissing):
                counts["failed_promotions"] += 1
        elif isinstance(job, Spill):
            if job.error is None:
                counts["spilled"] += 1
                counts["spilled_nbytes"] += job.data.nbytes
            elif isinstance(job.error, StaleGeneration):
                counts["stale_spills"] += 1
            else:
                counts["failed_spills"] += 1
        elif isinstance(job, Carry):
            if job.error is None:
                counts["carried"] += 1
                counts["carried_nbytes"] += job.data.nbytes
            else:
                counts["failed_carries"] += 1
        elif isinstance(job, Flush):
            counts["flushes"] += 1
