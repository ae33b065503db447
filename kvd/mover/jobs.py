"""What mover threads do for the loop: one class per kind of work. A job's outcome is written once, by its thread.

The loop makes a job, submits it, and gets it back through `Mover.take_done`, whatever happened to it: done, failed,
cancelled, or lost with its thread. Then it calls `job.finish()`, which tells whoever asked. Until then the loop touches
nothing of it but `Mover.cancel` and `Mover.hurry`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvd.block import NamespaceDigest
from kvd.errors import CudaError, TierError, TierUnavailable
from kvd.memory import BlockMemory
from kvd.pool import FillTicket, SpillTicket
from kvd.tiers.base import TierKey
from kvd.tiers.names import NamespaceName
from kvd.tiers.stack import Flushed, Generations, Listed


class Rank(enum.IntEnum):
    """Which work goes first."""

    QUESTION = 0  # somebody waits for a small answer; a thread of its own serves these
    WANTED_FILL = 1  # somebody waits for the block
    FLUSH = 2
    FILL = 3  # promoted ahead of need
    SPILL = 4
    MEASURE = 5  # for status only


class JobState(enum.Enum):
    """The queue's lock guards every move."""

    QUEUED = "queued"
    RUNNING = "running"  # it cannot be taken back
    DONE = "done"  # on its way to the loop, or there


class Job:
    """One piece of work. `on_done` is called on the loop, with this job."""

    __slots__ = ("_on_done", "cancelled", "error", "rank", "state")

    default_rank: ClassVar[Rank]

    def __init__(self, on_done: Callable[..., None], rank: Rank | None = None) -> None:
        self._on_done = on_done
        self.rank = self.default_rank if rank is None else rank
        self.state = JobState.QUEUED
        self.cancelled = False
        self.error: TierError | CudaError | None = TierUnavailable("the copy did not run to its end", cause="not-run")
        """None once it went well."""

    def finish(self) -> None:
        """On the loop, exactly once: tells whoever asked, and lets go of the memory."""
        self._on_done(self)


class Lookup(Job):
    """Which of these blocks are below, and where. `places` is one entry a key once done."""

    __slots__ = ("keys", "places")
    default_rank = Rank.QUESTION

    def __init__(self, keys: Sequence[TierKey], on_done: Callable[[Lookup], None]) -> None:
        super().__init__(on_done)
        self.keys = keys
        self.places: list[int | None] = [None] * len(keys)


class Learn(Job):
    """The generations of one namespace, and of each whether it began with a flush."""

    __slots__ = ("flushed", "generations", "name", "namespace")
    default_rank = Rank.QUESTION

    def __init__(
        self,
        namespace: NamespaceDigest,
        unknown: Generations,
        on_done: Callable[[Learn], None],
        *,
        name: NamespaceName | None = None,
    ) -> None:
        super().__init__(on_done)
        self.namespace = namespace
        self.name = name
        self.generations = unknown
        self.flushed = (False,) * len(unknown)


class Fill(Job):
    """Copies one block up. `into` is the whole block in its segment; nobody else touches it until the completion."""

    __slots__ = ("drop_below", "into", "kept_below", "key", "place", "ticket")
    default_rank = Rank.FILL

    def __init__(
        self,
        ticket: FillTicket,
        key: TierKey,
        place: int,
        into: BlockMemory,
        on_done: Callable[[Fill], None],
        *,
        wanted: bool,
        drop_below: bool = False,
    ) -> None:
        super().__init__(on_done, Rank.WANTED_FILL if wanted else Rank.FILL)
        self.ticket = ticket
        self.key = key
        self.place = place
        self.into = into
        self.drop_below = drop_below
        self.kept_below = True
        """Whether the lower tiers still have it."""

    def finish(self) -> None:
        self.into.release()
        super().finish()


class Spill(Job):
    """Copies one block down. `data` does not change until the completion: the block is sealed and referenced."""

    __slots__ = ("data", "generations", "itemsize", "key", "lasting_only", "ticket")
    default_rank = Rank.SPILL

    def __init__(
        self,
        ticket: SpillTicket,
        data: BlockMemory,
        generations: Generations,
        on_done: Callable[[Spill], None],
        *,
        itemsize: int = 2,
        lasting_only: bool = False,
    ) -> None:
        super().__init__(on_done)
        self.ticket = ticket
        self.key = TierKey(ticket.namespace, ticket.hash)
        self.data = data
        self.generations = generations
        self.itemsize = itemsize
        self.lasting_only = lasting_only

    def finish(self) -> None:
        self.data.release()
        super().finish()


class Carry(Job):
    """Copies one block from one pool to another, of which one lies on a card and the other in host memory.

    `data` is sealed and referenced, `into` nobody else touches, both until the completion.
    """

    __slots__ = ("checksum", "data", "into", "ticket")
    default_rank = Rank.FILL

    def __init__(
        self,
        ticket: FillTicket,
        data: BlockMemory,
        into: BlockMemory,
        on_done: Callable[[Carry], None],
        *,
        checksum: int,
        rank: Rank,
    ) -> None:
        """`checksum` is what the block's writer gave, 0 for none."""
        super().__init__(on_done, rank)
        self.ticket = ticket
        self.data = data
        self.into = into
        self.checksum = checksum

    def finish(self) -> None:
        self.data.release()
        self.into.release()
        super().finish()


class Audit(Job):
    """Compares blocks on cards with the checksums of their writers. Each `data` is sealed and referenced."""

    __slots__ = ("checksums", "data", "differs")
    default_rank = Rank.FILL

    def __init__(self, data: Sequence[BlockMemory], checksums: Sequence[int], on_done: Callable[[Audit], None]) -> None:
        super().__init__(on_done)
        self.data = data
        self.checksums = checksums
        self.differs: list[bool | None] = [None] * len(data)
        """By block; None where it could not be read."""

    def finish(self) -> None:
        for one in self.data:
            one.release()
        super().finish()


class Flush(Job):
    """Makes one namespace unfindable below."""

    __slots__ = ("levels", "name", "namespace", "result")
    default_rank = Rank.FLUSH

    def __init__(
        self,
        namespace: NamespaceDigest,
        unknown: Generations,
        on_done: Callable[[Flush], None],
        *,
        levels: frozenset[int] | None = None,
        name: NamespaceName | None = None,
    ) -> None:
        super().__init__(on_done)
        self.namespace = namespace
        self.name = name
        self.levels = levels
        self.result = Flushed(unknown, [])


class Drop(Job):
    """Forgets single blocks in every tier."""

    __slots__ = ("keys",)
    default_rank = Rank.FLUSH

    def __init__(self, keys: Sequence[TierKey], on_done: Callable[[Drop], None]) -> None:
        super().__init__(on_done)
        self.keys = keys


class ListNames(Job):
    """Which namespaces the tiers know by name."""

    __slots__ = ("levels", "result")
    default_rank = Rank.FLUSH

    def __init__(self, on_done: Callable[[ListNames], None], *, levels: frozenset[int] | None = None) -> None:
        super().__init__(on_done)
        self.levels = levels
        self.result = Listed([], [])


class Measure(Job):
    """Asks the tiers what they hold."""

    __slots__ = ()
    default_rank = Rank.MEASURE
