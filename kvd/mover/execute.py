"""Carries out one batch against the tiers, on whichever thread calls it. No queue, no state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import cast

import xxhash

from kvd.block import NamespaceDigest
from kvd.errors import BlockCorrupt, TierError
from kvd.mover.jobs import Drop, Fill, Flush, Job, Learn, ListNames, Lookup, Measure, Spill
from kvd.tiers.base import Read
from kvd.tiers.names import NamespaceName
from kvd.tiers.stack import Put, Stack


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
    outcomes = stack.get_many([Read(job.key, job.into) for job in jobs], [job.place for job in jobs])
    for job, outcome in zip(jobs, outcomes, strict=True):
        job.error = outcome
    moved = [job for job in jobs if job.drop_below and job.error is None]
    if moved and stack.delete([job.key for job in moved]):
        for job in moved:
            job.kept_below = False


def _spill(jobs: Sequence[Spill], stack: Stack) -> None:
    # A stray write through some client's mapping must not spread: what its writer vouched for is checked first.
    whole = [job for job in jobs if not job.ticket.checksum or _checksum(job.data) == job.ticket.checksum]
    for job in jobs:
        if job not in whole:
            job.error = BlockCorrupt("the block's bytes are not those its writer sealed", cause="corrupt-source")
    for lasting_only in {job.lasting_only for job in whole}:
        same = [job for job in whole if job.lasting_only is lasting_only]
        puts = [Put(job.key, job.data, job.generations, job.itemsize) for job in same]
        for job, outcome in zip(same, stack.put_many(puts, lasting_only=lasting_only), strict=True):
            job.error = outcome


def _checksum(data: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)
