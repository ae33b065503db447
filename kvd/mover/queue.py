"""The jobs that wait, by rank, and the one lock that every change of a job's state is made under."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from kvd.mover.jobs import Job, JobState, Rank

MAX_BATCH = 8
"""Copies of one kind that are handed to a tier together: it pipelines them, and a batch stays a matter of milliseconds
so that what is more urgent need not wait long."""
MAX_QUESTIONS = 64
"""Small questions are answered together, in one round trip."""
MAX_FLUSHES = 64
"""One batch of flushes looks once at all that a tier holds."""
_LIMITS = {Rank.QUESTION: MAX_QUESTIONS, Rank.FLUSH: MAX_FLUSHES}


class JobQueue:
    """First in, first out within a rank. Used by the loop and by every mover thread."""

    def __init__(self, *, max_spillers: int, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `max_spillers` threads copy down at the same time: the others are for those who wait."""
        self._changed = threading.Condition()
        self._ranks: dict[Rank, deque[Job]] = {rank: deque() for rank in Rank}
        self._num_queued: dict[Rank, int] = dict.fromkeys(Rank, 0)
        self._num_running: dict[Rank, int] = dict.fromkeys(Rank, 0)
        self._num_spillers = 0
        self._clock = clock
        self._begun_s: dict[Job, tuple[Rank, float]] = {}
        """Of each batch that runs, by its first job."""
        self._max_spillers = max_spillers
        self._closed = False

    def put(self, jobs: Iterable[Job]) -> list[Job]:
        """Queues them at their ranks; after `close` they are cancelled instead, and returned."""
        with self._changed:
            fresh = list(jobs)
            for job in fresh:
                self._ranks[job.rank].append(job)
                self._num_queued[job.rank] += 1
            self._changed.notify_all()
            return [job for job in fresh if self._cancel(job)] if self._closed else []

    def take(self, ranks: Collection[Rank]) -> list[Job] | None:
        """Waits for work of these ranks, most urgent first: one batch of one kind, RUNNING now. None after `close`.

        Every batch must be given to `done`.
        """
        with self._changed:
            while not self._closed:
                for rank in sorted(ranks):
                    if rank is Rank.SPILL and self._num_spillers >= self._max_spillers:
                        continue
                    if batch := self._batch(rank):
                        self._num_spillers += rank is Rank.SPILL
                        return batch
                self._changed.wait()
            return None

    def done(self, batch: list[Job]) -> None:
        """The thread is through with a batch it took."""
        with self._changed:
            rank = batch[0].rank
            self._begun_s.pop(batch[0], None)
            self._num_running[rank] -= len(batch)
            for job in batch:
                job.state = JobState.DONE
            if rank is Rank.SPILL:
                self._num_spillers -= 1
                self._changed.notify_all()

    def owed_since_s(self, *, copies: bool) -> float | None:
        """Since when the tiers owe an answer: to a question, or with `copies` to a promotion.

        None while they were not asked yet, though a thread is free to: it has not got its turn on this machine. minus
        infinity when there is nothing to be answered.
        """
        asked = (Rank.WANTED_FILL, Rank.FILL) if copies else (Rank.QUESTION,)
        # A flush that hangs takes a thread that would promote; spills never take the last one.
        busy = (*asked, Rank.FLUSH, Rank.MEASURE) if copies else asked
        with self._changed:
            begun = [begun_s for rank, begun_s in self._begun_s.values() if rank in busy]
            if begun:
                return min(begun)
            return None if any(self._num_queued[rank] for rank in asked) else -math.inf

    def cancel(self, jobs: Iterable[Job]) -> list[Job]:
        """Takes back those that no thread has begun; they are DONE and cancelled now, and are returned."""
        with self._changed:
            return [job for job in jobs if self._cancel(job)]

    def hurry(self, jobs: Iterable[Job], rank: Rank) -> None:
        """Moves those that still wait to a more urgent rank."""
        with self._changed:
            for job in jobs:
                if job.state is JobState.QUEUED and rank < job.rank:
                    self._num_queued[job.rank] -= 1
                    job.rank = rank  # the old place in the line is void: its rank is not the job's
                    self._num_queued[rank] += 1
                    self._ranks[rank].append(job)
            self._changed.notify_all()

    def close(self) -> list[Job]:
        """Nothing is taken from now on; what waited is cancelled and returned. Idempotent."""
        with self._changed:
            self._closed = True
            left = [job for rank, line in self._ranks.items() for job in line if job.rank is rank and self._cancel(job)]
            for line in self._ranks.values():
                line.clear()
            self._changed.notify_all()
            return left

    def counts(self) -> dict[Rank, tuple[int, int]]:
        """(queued, running) by rank."""
        with self._changed:
            return {rank: (self._num_queued[rank], self._num_running[rank]) for rank in Rank}

    def _batch(self, rank: Rank) -> list[Job]:
        line = self._ranks[rank]
        batch: list[Job] = []
        limit = _LIMITS.get(rank, MAX_BATCH)
        while line and len(batch) < limit:
            job = line[0]
            if job.state is not JobState.QUEUED or job.rank is not rank:
                line.popleft()
                continue
            if batch and type(job) is not type(batch[0]):
                break
            line.popleft()
            job.state = JobState.RUNNING
            batch.append(job)
        self._num_queued[rank] -= len(batch)
        self._num_running[rank] += len(batch)
        if batch:
            self._begun_s[batch[0]] = (rank, self._clock())
        return batch

    def _cancel(self, job: Job) -> bool:
        if job.state is not JobState.QUEUED:
            return False
        job.state = JobState.DONE
        job.cancelled = True
        self._num_queued[job.rank] -= 1
        return True
