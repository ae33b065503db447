"""Threads that carry jobs out off the loop, and the way their results come back to it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvd.block import NamespaceDigest
from kvd.mover.execute import execute
from kvd.mover.figures import MoverFigures
from kvd.mover.jobs import Job, Rank
from kvd.mover.queue import JobQueue
from kvd.status import MoverStatus
from kvd.tiers.stack import Stack

COPY_NICENESS = 5
"""Where cores are short, the loop goes before copies: it takes the tail of a begin from 10 ms to 2."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """One thread's name and what it works on."""

    name: str
    ranks: Collection[Rank]
    niceness: int = 0


class Mover:
    """One thread for questions, `num_copiers` for copies, of which one at least is never taken by spills.

    The loop submits jobs and takes them back after `on_ready` was called (on a mover thread: let it write to an
    eventfd). Every job comes back exactly once, also when its thread dies; such a thread is replaced and counted.

    `submit`, `cancel`, `hurry`, `take_done` and `status` are for the loop and never wait for a copy or a tier.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        on_ready: Callable[[], None] = lambda: None,
        num_copiers: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack = stack
        self._on_ready = on_ready
        self._queue = JobQueue(max_spillers=max(1, num_copiers - 1), clock=clock)
        self._done: deque[Job] = deque()
        self._flushed: deque[NamespaceDigest] = deque()
        self._figures = MoverFigures()
        copies = tuple(rank for rank in Rank if rank is not Rank.QUESTION)
        self._lanes = [Lane("kvd-mover-ask", (Rank.QUESTION,))]
        self._lanes += [Lane(f"kvd-mover-copy-{number}", copies, COPY_NICENESS) for number in range(num_copiers)]
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._num_restarts = 0
        self._has_answered = False
        self._closed = False

    def start(self) -> None:
        """Starts the threads."""
        for lane in self._lanes:
            self._start(lane)

    def submit(self, jobs: Iterable[Job]) -> None:
        """They come back through `take_done`."""
        self._give_back(self._queue.put(jobs))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Those that no thread has begun come back at once, cancelled; the others when they are done."""
        self._give_back(self._queue.cancel(jobs))

    def hurry(self, jobs: Iterable[Job]) -> None:
        """Somebody waits for these promotions now."""
        self._queue.hurry(jobs, Rank.WANTED_FILL)

    def owed_since_s(self, *, copies: bool) -> float | None:
        """Since when the tiers owe the answer to a question, or with `copies` to a promotion; see `JobQueue`.

        None, too, before they have answered anything: the first contact takes connecting, and perhaps a server's start.
        """
        since_s = self._queue.owed_since_s(copies=copies)
        return since_s if self._has_answered or since_s == -math.inf else None

    def take_done(self) -> list[Job]:
        """Jobs that are through. Call `finish` of each."""
        taken = []
        while self._done:
            job = self._done.popleft()
            self._figures.took(job)
            self._has_answered |= job.error is None
            taken.append(job)
        return taken

    def take_flushed(self) -> list[NamespaceDigest]:
        """Namespaces that a tier says somebody else flushed; they are flushed in every tier by now."""
        taken = []
        while self._flushed:
            taken.append(self._flushed.popleft())
        return taken

    def status(self) -> MoverStatus:
        """The queue, the threads, the counters."""
        counts = self._queue.counts()
        with self._lock:
            num_alive = sum(thread.is_alive() for thread in self._threads.values())
        return MoverStatus(
            num_threads=len(self._lanes),
            num_threads_alive=num_alive,
            num_thread_restarts=self._num_restarts,
            queued={rank.name.lower(): queued for rank, (queued, _) in counts.items()},
            running={rank.name.lower(): running for rank, (_, running) in counts.items()},
            counters=dict(self._figures.counts),
        )

    def close(self) -> None:
        """Waiting jobs are cancelled; running ones are waited for, which the tiers' time-outs bound. Idempotent."""
        with self._lock:
            self._closed = True
        self._give_back(self._queue.close())
        for thread in list(self._threads.values()):
            thread.join()

    def _start(self, lane: Lane) -> None:
        with self._lock:
            # Without this a thread that dies during `close` would leave one behind that nobody joins.
            if self._closed:
                return
            thread = threading.Thread(target=self._run, args=(lane,), name=lane.name, daemon=True)
            self._threads[lane.name] = thread
            thread.start()

    def _run(self, lane: Lane) -> None:
        _be_nice(lane.niceness)
        while (batch := self._queue.take(lane.ranks)) is not None:
            lives = False
            try:
                execute(batch, self.stack)
                self._flushed.extend(self.stack.take_flushed())
                lives = True
            finally:
                # Whatever happened, the jobs come back; one that was not finished still says that it failed.
                self._queue.done(batch)
                if not lives:
                    self._replace(lane)
                self._give_back(batch)

    def _replace(self, lane: Lane) -> None:
        """On a thread that dies of a defect; `threading.excepthook` tells what it was."""
        _log.error("a defect in kvd: thread %s died and is replaced", lane.name)
        self._num_restarts += 1
        self._start(lane)

    def _give_back(self, jobs: Iterable[Job]) -> None:
        self._done.extend(jobs)
        if self._done or self._flushed:
            self._on_ready()


def _be_nice(more: int) -> None:
    """Lowers the priority of the calling thread alone."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + more)
    except OSError as error:  # a sandbox may forbid it
        _log.info("%s keeps its priority: %s", threading.current_thread().name, error)
