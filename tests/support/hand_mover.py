"""A mover without threads: the test says which job runs when, and when the loop hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvd.mover import Job, Mover
from kvd.mover.execute import execute
from kvd.mover.jobs import JobState
from kvd.tiers.stack import Stack

JobT = TypeVar("JobT", bound=Job)


class HandMover(Mover):
    def __init__(self, stack: Stack, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stack, clock=clock)
        self._jobs: list[Job] = []

    def submit(self, jobs: Iterable[Job]) -> None:
        fresh = list(jobs)
        super().submit(fresh)
        self._jobs += fresh

    def take_done(self) -> list[Job]:
        """One at a time, so that what it causes can be seen before the next."""
        if not self._done:
            return []
        job = self._done.popleft()
        self._figures.took(job)
        self._has_answered |= job.error is None
        return [job]

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def waiting(self, kind: type[JobT]) -> list[JobT]:
        """Jobs that no thread has begun, in the order in which they came."""
        return [job for job in self._jobs if isinstance(job, kind) and job.state is JobState.QUEUED]

    def running(self, kind: type[JobT]) -> list[JobT]:
        return [job for job in self._jobs if isinstance(job, kind) and job.state is JobState.RUNNING]

    def begin(self, job: Job) -> None:
        """A thread takes it: it cannot be cancelled any more."""
        with self._queue._changed:
            assert job.state is JobState.QUEUED
            job.state = JobState.RUNNING
            self._queue._num_queued[job.rank] -= 1
            self._queue._num_running[job.rank] += 1
            self._queue._begun_s[job] = (job.rank, self._queue._clock())
            self._queue._num_spillers += job.rank == 4

    def end(self, job: Job) -> None:
        """The thread carries it out and gives it back; the loop has not looked yet."""
        assert job.state is JobState.RUNNING
        execute([job], self.stack)
        self._flushed.extend(self.stack.take_flushed())
        self._queue.done([job])
        self._jobs.remove(job)
        self._give_back([job])

    def lose(self, job: Job) -> None:
        """A thread takes it and dies of a defect: it comes back as it went."""
        self.begin(job)
        self._queue.done([job])
        self._jobs.remove(job)
        self._give_back([job])

    def do(self, job: Job) -> None:
        self.begin(job)
        self.end(job)
