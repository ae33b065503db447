"""Carries out one batch against the tiers, on whichever thread calls it. No queue, no state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import cast

import xxhash

from kvd.block import NamespaceDigest
from kvd.errors import BlockCorrupt, CudaError, TierError
from kvd.memory.block_memory import alike, carrying, readable, together, writable
from kvd.mover.jobs import Audit, Carry, Drop, Fill, Flush, Job, Learn, ListNames, Lookup, Measure, Spill
from kvd.tiers.base import Read
from kvd.tiers.names import NamespaceName
from kvd.tiers.stack import Put, Stack

_CORRUPT_SOURCE = "the block's bytes are not those its writer sealed"


def execute(batch: Sequence[Job], stack: Stack) -> None:
    """Writes the outcome of every job of a batch, all of one kind. Raises nothing that a tier may raise."""
    kind = type(batch[0])
    try:
        if kind is Lookup:
            _look_up(cast("Sequence[Lookup]", batch), stack)
        elif kind is Learn:
            _learn(cast("Sequence[Learn]", batch), stack)
        elif kind is Fill:
            _fill(cast("Sequence[Fill]", batch), stack)
        elif kind is Spill:
            _spill(cast("Sequence[Spill]", batch), stack)
        elif kind is Carry:
            _carry(cast("Sequence[Carry]", batch))
        elif kind is Flush:
            _flush(cast("Sequence[Flush]", batch), stack)
        else:
            for job in batch:
                _one(job, stack)
    except TierError as error:
        for job in batch:
            job.error = error


def _one(job: Job, stack: Stack) -> None:
    if isinstance(job, ListNames):
        job.result = stack.listed(levels=job.levels)
    elif isinstance(job, Drop):
        stack.delete(job.keys)
    elif isinstance(job, Measure):
        stack.measure()
    elif isinstance(job, Audit):
        _audit(job)
    job.error = None


def _learn(jobs: Sequence[Learn], stack: Stack) -> None:
    told = stack.generations([job.namespace for job in jobs], _names(jobs))
    for job, generations in zip(jobs, told, strict=True):
        job.generations = generations
        job.flushed = stack.flushed(job.namespace)
        job.error = None


def _flush(jobs: Sequence[Flush], stack: Stack) -> None:
    for levels in {job.levels for job in jobs}:
        same = [job for job in jobs if job.levels == levels]
        results = stack.flush_many([job.namespace for job in same], levels=levels, names=_names(same))
        for job, result in zip(same, results, strict=True):
            job.result = result
            job.error = None


def _names(jobs: Sequence[Learn] | Sequence[Flush]) -> dict[NamespaceDigest, NamespaceName]:
    return {job.namespace: job.name for job in jobs if job.name is not None}


def _look_up(jobs: Sequence[Lookup], stack: Stack) -> None:
    places = iter(stack.locate(list(chain.from_iterable(job.keys for job in jobs))))
    for job in jobs:
        job.places = [next(places) for _ in job.keys]
        job.error = None


def _fill(jobs: Sequence[Fill], stack: Stack) -> None:
    for group in together([job.into for job in jobs]):
        same = [jobs[index] for index in group]
        try:
            outcomes = _fill_group(same, stack)
        except CudaError as error:
            # Which of the copies it was, nobody can say.
            outcomes = [error] * len(same)
        for job, outcome in zip(same, outcomes, strict=True):
            job.error = outcome
    moved = [job for job in jobs if job.drop_below and job.error is None]
    if moved and stack.delete([job.key for job in moved]):
        for job in moved:
            job.kept_below = False


def _fill_group(jobs: Sequence[Fill], stack: Stack) -> list[TierError | CudaError | None]:
    """The outcomes; what is said to be well is where it belongs, on a card too. Raises `CudaError`."""
    with writable([job.into for job in jobs]) as target:
        reads = [Read(job.key, view) for job, view in zip(jobs, target.views, strict=True)]
        outcomes = stack.get_many(reads, [job.place for job in jobs])
        target.keep(index for index, outcome in enumerate(outcomes) if outcome is None)
    return [*outcomes]


def _spill(jobs: Sequence[Spill], stack: Stack) -> None:
    for group in together([job.data for job in jobs]):
        same = [jobs[index] for index in group]
        try:
            with readable([job.data for job in same]) as views:
                _put(list(zip(same, views, strict=True)), stack)
        except CudaError as error:
            for job in same:
                job.error = error


def _put(spills: Sequence[tuple[Spill, memoryview]], stack: Stack) -> None:
    # A stray write through some client's mapping must not spread: what its writer vouched for is checked first.
    whole: list[tuple[Spill, memoryview]] = []
    for job, data in spills:
        if not job.ticket.checksum or _checksum(data) == job.ticket.checksum:
            whole.append((job, data))
        else:
            job.error = BlockCorrupt(_CORRUPT_SOURCE, cause="corrupt-source")
    for lasting_only in {job.lasting_only for job, _ in whole}:
        same = [(job, data) for job, data in whole if job.lasting_only is lasting_only]
        puts = [Put(job.key, data, job.generations, job.itemsize) for job, data in same]
        for (job, _), outcome in zip(same, stack.put_many(puts, lasting_only=lasting_only), strict=True):
            job.error = outcome


def _carry(jobs: Sequence[Carry]) -> None:
    for group in alike([(job.data, job.into) for job in jobs]):
        same = [jobs[index] for index in group]
        try:
            with carrying([(job.data, job.into) for job in same]) as views:
                for job, view in zip(same, views, strict=True):
                    whole = not job.checksum or _checksum(view) == job.checksum
                    job.error = None if whole else BlockCorrupt(_CORRUPT_SOURCE, cause="corrupt-source")
        except CudaError as error:
            for job in same:
                job.error = error


def _audit(job: Audit) -> None:
    for group in together(job.data):
        try:
            with readable([job.data[index] for index in group]) as views:
                found = [_checksum(view) for view in views]
        except CudaError:
            continue
        for index, checksum in zip(group, found, strict=True):
            job.differs[index] = checksum != job.checksums[index]


def _checksum(data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)
