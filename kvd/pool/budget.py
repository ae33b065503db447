"""One byte budget for the pools of a device: who may grow, and whose segment goes when the budget is used up."""

from __future__ import annotations

from kvd.pool.blocks import Segment
from kvd.pool.store import BlockStore, age


class Budget:
    """Counts in segments, since pools grow and shrink by nothing smaller."""

    def __init__(self, *, budget_nbytes: int, segment_nbytes: int, floor_segments: int) -> None:
        self.segment_nbytes = segment_nbytes
        self.budget_nbytes = budget_nbytes
        self._floor_segments = floor_segments
        self._had_segments: int | None = None
        """What the machine gave before it gave no more; None while it has not refused."""
        self.failure = ""
        """Why it refused."""
        self.num_draining = 0
        """Segments that left their pools and whose memory is not back yet, since clients still map it."""
        self.stores: list[BlockStore] = []

    @property
    def num_segments(self) -> int:
        """Segments of all pools, the retiring ones included: their memory is not back yet."""
        return sum(len(store.segments) for store in self.stores)

    @property
    def limit(self) -> int:
        """Segments all pools may have together."""
        limit = self.budget_nbytes // self.segment_nbytes
        return limit if self._had_segments is None else min(limit, self._had_segments)

    @property
    def headroom(self) -> int:
        """Segments up to the limit; negative while retiring or draining ones still hold memory above it."""
        return self.limit - self.num_segments - self.num_draining

    @property
    def room(self) -> int:
        """Segments that may still be added."""
        return max(0, self.headroom)

    def room_for(self, store: BlockStore) -> int:
        """Segments that may still be added to this pool."""
        return min(self.room, store.num_addable)

    @property
    def room_for_any(self) -> int:
        """Segments that may still be added, to whichever pool."""
        return min((self.room_for(store) for store in self.stores), default=self.room)

    @property
    def floor(self) -> int:
        """Segments a pool keeps against the others; less than configured where the budget cannot hold that for all."""
        return min(self._floor_segments, self.limit // max(1, len(self.stores)))

    def growth_failed(self, reason: str) -> None:
        """The machine gives no more than what the pools have now; a segment one gives up can still go to another."""
        self._had_segments = self.num_segments + self.num_draining
        self.failure = reason

    def memory_retry(self) -> None:
        """It may give more again."""
        self._had_segments = None
        self.failure = ""

    def set_nbytes(self, budget_nbytes: int) -> None:
        """A smaller budget retires segments until the rest fits: unpinned ones first, the coldest of those first."""
        self.budget_nbytes = budget_nbytes
        for store, segment in self.excess(budget_nbytes):
            store.retire(segment)

    def excess(self, budget_nbytes: int) -> list[tuple[BlockStore, Segment]]:
        """What a budget of that size would retire, in that order."""
        num_fit = budget_nbytes // self.segment_nbytes
        # The floors of all fit the budget, so leaving each pool its own never leaves too much.
        floor = min(self._floor_segments, num_fit // max(1, len(self.stores)))
        spare = {store.pool_id: store.num_active() - floor for store in self.stores}
        num_excess = sum(store.num_active() for store in self.stores) - num_fit
        candidates = sorted(
            ((segment.num_pinned, age(segment), store, segment) for store in self.stores for segment in store.active()),
            key=lambda candidate: candidate[:2],
        )
        chosen: list[tuple[BlockStore, Segment]] = []
        for _, _, store, segment in candidates:
            if len(chosen) >= num_excess:
                break
            if spare[store.pool_id] > 0:
                spare[store.pool_id] -= 1
                chosen.append((store, segment))
        return chosen

    def num_obtainable(self, asking: BlockStore) -> int:
        """Segments the pool could get at most: the room, and what the other pools could give up."""
        floor = self.floor
        reclaimable = sum(
            min(len(store.unpinned()), max(0, store.num_active() - floor))
            for store in self.stores
            if store is not asking
        )
        return min(max(0, self.headroom + reclaimable), asking.num_addable)

    def reclaim(self, asking: BlockStore, wanted_room: int, *, colder_than: int | None) -> None:
        """Takes unpinned segments from other pools, the coldest first, until there is room for `wanted_room`.

        Only ones not used since the stamp `colder_than`, unless that is None. Pools at their floor keep theirs. Takes
        none where that would give no room at all, since retiring segments still hold memory above the limit, and none
        that the pool would have no block ids for.
        """
        wanted_room = min(wanted_room, asking.num_addable)
        spare = {store.pool_id: store.num_active() - self.floor for store in self.stores if store is not asking}
        candidates = sorted(
            (
                (age(segment), store, segment)
                for store in self.stores
                if store is not asking
                for segment in store.unpinned()
            ),
            key=lambda candidate: candidate[0],
        )
        chosen: list[tuple[BlockStore, Segment]] = []
        for stamp, store, segment in candidates:
            if self.headroom + len(chosen) >= wanted_room or (colder_than is not None and stamp >= colder_than):
                break
            if spare[store.pool_id] > 0:
                spare[store.pool_id] -= 1
                chosen.append((store, segment))
        if self.headroom + len(chosen) > 0:
            for store, segment in chosen:
                store.retire(segment)
