"""The simplest tier that keeps the contract: a dictionary. A model for others, and a tier for tests above it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kvd.block import NamespaceDigest
from kvd.errors import BlockCorrupt, BlockMissing, StaleGeneration, TierFull, TierUnavailable
from kvd.status import TierStatus, TierUsage
from kvd.tiers.base import Generation, Outcome, Read, Tier, TierKey, Write
from kvd.tiers.counters import TierCounters
from kvd.tiers.names import NamespaceName


class DictTier(Tier):
    """Holds at most `max_blocks`; refuses more, as a Redis that may not evict."""

    def __init__(self, *, name: str = "dict", max_blocks: int = 1 << 30) -> None:
        self.name = name
        self.blocks: dict[TierKey, bytes] = {}
        self._max_blocks = max_blocks
        self._generations: Counter[NamespaceDigest] = Counter()
        self._names: dict[NamespaceDigest, NamespaceName] = {}
        self._flushed_elsewhere: list[NamespaceDigest] = []
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._closed = False

    def generation(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        self._check_open()
        if name is not None:
            self._names[namespace] = name
        return Generation(self._generations[namespace])

    def contains(self, keys: Sequence[TierKey]) -> list[bool]:
        self._check_open()
        return [key in self.blocks for key in keys]

    def get_many(self, reads: Sequence[Read]) -> list[Outcome]:
        with self._lock:
            outcomes = [self._get(read) for read in reads]
        nbytes = sum(len(read.into) for read, one in zip(reads, outcomes, strict=True) if one is None)
        self._counters.reads(outcomes, nbytes=nbytes, seconds=0.0)
        return outcomes

    def put_many(self, writes: Sequence[Write]) -> list[Outcome]:
        with self._lock:
            outcomes = [self._put(write) for write in writes]
        nbytes = sum(len(write.data) for write, one in zip(writes, outcomes, strict=True) if one is None)
        self._counters.writes(outcomes, nbytes=nbytes, seconds=0.0)
        return outcomes

    def delete(self, keys: Sequence[TierKey]) -> int:
        self._check_open()
        with self._lock:
            num_deleted = sum(self.blocks.pop(key, None) is not None for key in keys)
        self._counters.deletes(num_deleted)
        return num_deleted

    def names(self) -> list[NamespaceName]:
        self._check_open()
        return list(self._names.values())

    def flush(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        self._check_open()
        if name is not None:
            self._names[namespace] = name
        with self._lock:
            self._generations[namespace] += 1
            self.blocks = {key: data for key, data in self.blocks.items() if key.namespace != namespace}
            return Generation(self._generations[namespace])

    def flushed_elsewhere(self, namespace: NamespaceDigest) -> None:
        """As if another daemon had flushed it; `take_flushed` tells."""
        self.flush(namespace)
        self._flushed_elsewhere.append(namespace)

    def was_flushed(self, namespace: NamespaceDigest) -> bool:
        return self._generations[namespace] > 0

    def take_flushed(self) -> list[NamespaceDigest]:
        found, self._flushed_elsewhere = self._flushed_elsewhere, []
        return found

    def usage(self) -> TierUsage:
        self._check_open()
        used_nbytes = sum(map(len, self.blocks.values()))
        return self._counters.measured(TierUsage(num_blocks=len(self.blocks), used_nbytes=used_nbytes, budget_nbytes=0))

    def status(self) -> TierStatus:
        return self._counters.status(name=self.name, kind="dict", state="down" if self._closed else "up")

    def close(self) -> None:
        self._closed = True

    def _get(self, read: Read) -> Outcome:
        if self._closed:
            return TierUnavailable("closed", cause="closed")
        data = self.blocks.get(read.key)
        if data is None:
            return BlockMissing("not there")
        if len(data) != len(read.into):
            del self.blocks[read.key]
            return BlockCorrupt("another length", cause="bad-length")
        read.into[:] = data
        return None

    def _put(self, write: Write) -> Outcome:
        if self._closed:
            return TierUnavailable("closed", cause="closed")
        if self._generations[write.key.namespace] != write.generation:
            return StaleGeneration("flushed", cause="flushed")
        if write.key not in self.blocks and len(self.blocks) >= self._max_blocks:
            return TierFull("full", cause="full")
        self.blocks[write.key] = bytes(write.data)
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable("closed", cause="closed")
