"""The contract of a tier, and nothing else: every tier passes the same conformance suite (tests/tiers).

Generations make a flush final. A namespace has one current generation per tier. Whoever puts a block names the
generation he learnt *before* that block was sealed; a tier never lets a block be read under another one. So a spill
that was in flight during a flush, or a second daemon that has not heard of it, stores nothing that can be found:

    generation = tier.generation(namespace, name)   # when the namespace is opened
    ... blocks are sealed ...
    tier.put(key, data, generation=generation)      # StaleGeneration: flushed since

Names make it reach everything. A tier keeps a namespace's name with its generation, so that whatever can be found under
that generation can be listed, by a daemon that never opened it, too.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, NewType, Self

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import TierError
from kvd.status import TierStatus, TierUsage
from kvd.tiers.names import NamespaceName

Generation = NewType("Generation", int)
"""Names the time between two flushes of one namespace in one tier. Only equality means anything."""


class TierKey(NamedTuple):
    """The name of a block in every tier. The namespace includes the tenant."""

    namespace: NamespaceDigest
    chain_hash: ChainHash


class Read(NamedTuple):
    """One block to fetch. `into` is writable, contiguous, and exactly as long as the block."""

    key: TierKey
    into: memoryview


class Write(NamedTuple):
    """One block to store. `data` must not change until the put returns; `itemsize`, bytes of a number, helps codecs."""

    key: TierKey
    data: memoryview
    generation: Generation
    itemsize: int = 2


Names = Mapping[NamespaceDigest, NamespaceName]
"""What namespaces are called, as far as known."""

Outcome = TierError | None
"""Of one item of a batch: None when it went well."""


class Tier(abc.ABC):
    """A place below the pool. All methods may be called from any thread, several at once; only `status` and
    `is_answering` never wait.

    A batch never raises for one item: it returns the outcome of each, so that one bad block costs one block. Calls on
    a closed tier fail with `TierUnavailable`.
    """

    name: str

    @abc.abstractmethod
    def generation(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        """The current generation, made now if there is none. Raises `TierUnavailable`.

        With `name`, `names` lists the namespace from now on, at the latest once a block was put.
        """

    def generations(self, namespaces: Sequence[NamespaceDigest], names: Names | None = None) -> list[Generation | None]:
        """`generation` of each, None where that fails. Worth overriding where each would cost a round trip."""
        return [self._generation_or_none(one, names) for one in namespaces]

    def names(self) -> list[NamespaceName]:
        """The named namespaces of which a block may be here, whoever put it, asked of the tier itself.

        Raises `TierUnavailable`. May take a while: a Redis is asked for every key.
        """
        return []

    @abc.abstractmethod
    def contains(self, keys: Sequence[TierKey]) -> list[bool]:
        """Which blocks are there now, asked of the tier itself in one round trip. Raises `TierUnavailable`.

        True is no promise: the block may be gone by the time it is fetched.
        """

    @abc.abstractmethod
    def get_many(self, reads: Sequence[Read]) -> list[Outcome]:
        """Fetch blocks. An outcome of None means that `into` holds exactly the bytes that were put.

        Otherwise `into` holds no meaning, and the outcome is `BlockMissing`, `BlockCorrupt` (the value was deleted),
        `CodecUnavailable` or `TierUnavailable`.
        """

    @abc.abstractmethod
    def put_many(self, writes: Sequence[Write]) -> list[Outcome]:
        """Store blocks, each wholly or not at all: a reader sees the old state or all of the new one.

        Storing a block that is there succeeds. Outcomes: `TierFull`, `TierUnavailable` or `StaleGeneration`.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[TierKey]) -> int:
        """Forget blocks; the number of those that were there. Raises `TierUnavailable`."""

    @abc.abstractmethod
    def flush(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        """Start a new generation: from now on nothing put under an older one is found, whoever puts it, whenever.

        Raises `TierUnavailable` when the tier cannot be told; then the flush is remembered and done before anything
        of the namespace is read or written here again. Who puts blocks under the new generation gives the `name`, here
        or to `generation`.
        """

    def flush_many(
        self, namespaces: Sequence[NamespaceDigest], names: Names | None = None
    ) -> list[Generation | TierError]:
        """`flush` of each, or its error. Worth overriding where each would look at everything there is."""
        return [self._flush_or_error(one, names) for one in namespaces]

    def was_flushed(self, namespace: NamespaceDigest) -> bool:
        """Whether the generation last learnt began with a flush, as far as is known without asking.

        False for one that was simply the first, or began because the tier had forgotten. Who learns another generation
        than he knew, or learns it after he sealed blocks, must drop those if it did.
        """
        return False

    def take_flushed(self) -> list[NamespaceDigest]:
        """Namespaces seen flushed by somebody else since the last call: drop them from the pool and other tiers."""
        return []

    def is_answering(self) -> bool:
        """False while it is no use to ask: closed, or down and not due to be tried again. Takes no lock."""
        return True

    @abc.abstractmethod
    def usage(self) -> TierUsage:
        """Ask the tier what it holds; the answer also shows in the next `status`. Raises `TierUnavailable`."""

    @abc.abstractmethod
    def status(self) -> TierStatus:
        """Counters and the last known usage. Does no I/O and waits for nobody."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""

    def get(self, key: TierKey, into: memoryview) -> None:
        """`get_many` of one; raises its outcome."""
        _raise_if_failed(self.get_many([Read(key, into)])[0])

    def put(self, key: TierKey, data: memoryview, *, generation: Generation, itemsize: int = 2) -> None:
        """`put_many` of one; raises its outcome."""
        _raise_if_failed(self.put_many([Write(key, data, generation, itemsize)])[0])

    def _generation_or_none(self, namespace: NamespaceDigest, names: Names | None) -> Generation | None:
        try:
            return self.generation(namespace, (names or {}).get(namespace))
        except TierError:
            return None

    def _flush_or_error(self, namespace: NamespaceDigest, names: Names | None) -> Generation | TierError:
        try:
            return self.flush(namespace, (names or {}).get(namespace))
        except TierError as error:
            return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raise_if_failed(outcome: Outcome) -> None:
    if outcome is not None:
        raise outcome
