"""A tier that fails when told to, wrapped around one that works: errors, lost acknowledgements, and calls that hang.

tier = FaultyTier(DictTier())
tier.fail_next("put", TierFull("full"))          # the next put of one block fails, nothing stored
tier.fail_next("put", error, after=True)         # it is stored, but the caller hears the error
tier.fail_always("get", TierUnavailable("gone")) # until `heal()`
with tier.hold("put") as gate:                   # the next call of put blocks ...
    gate.wait_entered()                          # ... the test waits until it is inside ...
    gate.release()                               # ... and lets it go on
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import msgspec

from kvd.block import NamespaceDigest
from kvd.errors import TierError
from kvd.status import TierStatus, TierUsage
from kvd.tiers.base import Generation, Outcome, Read, Tier, TierKey, Write
from kvd.tiers.names import NamespaceName

Call = Literal["generation", "contains", "get", "put", "delete", "flush", "usage", "names"]
_Value = TypeVar("_Value")
_Item = TypeVar("_Item", Read, Write)

_LIMIT_S = 30.0


class Gate:
    """One call held inside the tier."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._released = threading.Event()

    def wait_entered(self) -> None:
        """Until the call is inside."""
        assert self._entered.wait(_LIMIT_S), "the call to hold never came"

    def release(self) -> None:
        """Let it go on."""
        self._released.set()

    def pass_through(self) -> None:
        """Called by the tier."""
        self._entered.set()
        assert self._released.wait(_LIMIT_S), "the call was never released"


class FaultyTier(Tier):
    """Passes everything on to `inner` unless told otherwise. `calls` is the order in which calls came."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls: list[Call] = []
        self.down_for_s = 0.0
        """Above 0, the status says that it is down and for how long."""
        self._next: dict[Call, deque[tuple[TierError, bool]]] = {}
        self._always: dict[Call, TierError] = {}
        self._gates: dict[Call, deque[Gate]] = {}

    def fail_next(self, call: Call, error: TierError, *, after: bool = False) -> None:
        """The next one of these (of a batch: its next item) fails; with `after` it is done all the same."""
        self._next.setdefault(call, deque()).append((error, after))

    def fail_always(self, call: Call, error: TierError) -> None:
        """Until `heal`."""
        self._always[call] = error

    def heal(self) -> None:
        """No more faults."""
        self._next.clear()
        self._always.clear()

    @contextmanager
    def hold(self, call: Call) -> Iterator[Gate]:
        """The next call waits inside, before anything is done, until the gate is released."""
        gate = Gate()
        self._gates.setdefault(call, deque()).append(gate)
        try:
            yield gate
        finally:
            gate.release()

    def generation(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        return self._one("generation", lambda: self.inner.generation(namespace, name))

    def names(self) -> list[NamespaceName]:
        return self._one("names", self.inner.names)

    def contains(self, keys: Sequence[TierKey]) -> list[bool]:
        return self._one("contains", lambda: self.inner.contains(keys))

    def get_many(self, reads: Sequence[Read]) -> list[Outcome]:
        return self._many("get", reads, self.inner.get_many)

    def put_many(self, writes: Sequence[Write]) -> list[Outcome]:
        return self._many("put", writes, self.inner.put_many)

    def delete(self, keys: Sequence[TierKey]) -> int:
        return self._one("delete", lambda: self.inner.delete(keys))

    def flush(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        return self._one("flush", lambda: self.inner.flush(namespace, name))

    def was_flushed(self, namespace: NamespaceDigest) -> bool:
        return self.inner.was_flushed(namespace)

    def take_flushed(self) -> list[NamespaceDigest]:
        return self.inner.take_flushed()

    def usage(self) -> TierUsage:
        return self._one("usage", self.inner.usage)

    def status(self) -> TierStatus:
        status = self.inner.status()
        if self.down_for_s:
            status = msgspec.structs.replace(status, state="down", retry_in_s=self.down_for_s, reason="frozen")
        return status

    def is_answering(self) -> bool:
        return not self.down_for_s and self.inner.is_answering()

    def close(self) -> None:
        self.inner.close()

    def _one(self, call: Call, action: Callable[[], _Value]) -> _Value:
        self._enter(call)
        fault = self._fault(call)
        if fault is None:
            return action()
        error, after = fault
        if after:
            action()
        raise error

    def _many(
        self, call: Call, items: Sequence[_Item], action: Callable[[Sequence[_Item]], list[Outcome]]
    ) -> list[Outcome]:
        self._enter(call)
        faults = [self._fault(call) for _ in items]
        passed = [index for index, fault in enumerate(faults) if fault is None or fault[1]]
        outcomes: list[Outcome] = [None if fault is None else fault[0] for fault in faults]
        for index, outcome in zip(passed, action([items[index] for index in passed]), strict=True):
            outcomes[index] = outcomes[index] or outcome
        return outcomes

    def _enter(self, call: Call) -> None:
        self.calls.append(call)
        if self._gates.get(call):
            self._gates[call].popleft().pass_through()

    def _fault(self, call: Call) -> tuple[TierError, bool] | None:
        if self._next.get(call):
            return self._next[call].popleft()
        return (self._always[call], False) if call in self._always else None
