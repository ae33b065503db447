"""The Redis tier (L3): blocks in any Redis or Valkey, alone or a cluster, shared with other daemons or kvd's own.

Nothing is remembered about what Redis holds: every question goes there, in one round trip. Each answer that says
"here it is" comes with the namespace's generation, read after it, so a flush by anybody is noticed by the next call.
Trouble of any kind is a miss or a typed error in bounded time; the breaker keeps a dead server from costing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from kvd.block import NamespaceDigest
from kvd.errors import BlockCorrupt, BlockMissing, TierError, TierFull, TierUnavailable
from kvd.status import TierStatus, TierUsage
from kvd.tiers.base import Generation, Names, Outcome, Read, Tier, TierKey, Write
from kvd.tiers.breaker import BreakerState, CircuitBreaker
from kvd.tiers.codecs import codec_named
from kvd.tiers.counters import TierCounters
from kvd.tiers.names import NamespaceName
from kvd.tiers.redis_bulk import UNANSWERED, ReadJob, WriteJob, settle
from kvd.tiers.redis_generations import Generations
from kvd.tiers.redis_keys import RedisKeys
from kvd.tiers.redis_nodes import Keyed, RedisNodes
from kvd.tiers.redis_options import RedisOptions
from kvd.tiers.redis_records import RedisRecords
from kvd.tiers.redis_url import RedisAddress
from kvd.tiers.resp_connection import command

__all__ = ["RedisOptions", "RedisTier"]

RECORD_GRACE_S = 3600
"""A generation's record outlives every value put under it by this: it is touched after each of them."""

_MAX_VALUE_NBYTES = (512 << 20) - 4096  # servers refuse longer ones (proto-max-bulk-len)


class RedisTier(Tier):
    """Blocks in Redis. Connects when first asked: a Redis that is absent at start is a warning, not a failure.

    `records_expire=False` keeps the generations' records for ever; it is for a server whose policy evicts only what has
    a time to live, so that a burst of values can't push a record out, and its whole namespace out of reach. There, now
    and then, those without a value are dropped when there are very many.
    `on_flush(namespace, generation)` is called before Redis is told of a flush; the embedded server keeps its journal
    there, for a flush must outlive a crash. A `TierError` of it ends the flush, which stays remembered: nothing of the
    namespace is read or written until a later call gets through to both, so one flush may call it several times.
    """

    def __init__(
        self,
        address: RedisAddress,
        options: RedisOptions | None = None,
        *,
        name: str = "redis",
        records_expire: bool = True,
        on_flush: Callable[[NamespaceDigest, Generation], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._options = options or RedisOptions()
        self._address = address
        self._codec = codec_named(self._options.codec)
        self._keys = RedisKeys(self._options.prefix)
        self._on_flush = on_flush
        ttl_s = self._options.ttl_s + RECORD_GRACE_S
        self._nodes = RedisNodes(
            address,
            control_timeout_s=self._options.control_timeout_s,
            connect_timeout_s=self._options.connect_timeout_s,
            clock=clock,
        )
        self._generations = Generations()
        self._records_expire = records_expire
        record_ttl = (b"EX", b"%d" % ttl_s) if records_expire else ()
        self._records = RedisRecords(self._nodes, self._keys, self._generations, record_ttl)
        self._counters = TierCounters(clock)
        self._breaker = CircuitBreaker(clock=clock)
        # A full server answers well, so it has a breaker of its own, for puts only.
        self._room = CircuitBreaker(trips=TierFull, refusal=TierFull, first_backoff_s=0.5, clock=clock)
        self._closed = False

    def generation(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        """Reads the record; makes one if Redis has none (or forgot it), and adds a name that is missing there."""
        with self._counting(), self._call():
            return self._records.learn(namespace, name)

    def generations(self, namespaces: Sequence[NamespaceDigest], names: Names | None = None) -> list[Generation | None]:
        """One round trip for all whose record is there, which is the everyday case."""
        names = names or {}
        known: dict[NamespaceDigest, Generation | None] = {}
        with suppress(TierError), self._counting(), self._call():
            known = self._records.read(namespaces)
        return [
            generation
            if (generation := known.get(one)) is not None and (one not in names or self._generations.is_named(one))
            else self._generation_or_none(one, names)
            for one in namespaces
        ]

    def names(self) -> list[NamespaceName]:
        """Looks at every key there is, as `usage` does. Records of before names were kept are passed over."""
        with self._counting(), self._call():
            return self._records.names()

    def contains(self, keys: Sequence[TierKey]) -> list[bool]:
        """One round trip; a second one when the namespace turns out to be flushed since the last call."""
        found = [False] * len(keys)
        with self._counting(), self._call():
            left = list(range(len(keys)))
            for _ in range(2):
                used = self._known_generations(keys[index].namespace for index in left)
                named = [(index, used[keys[index].namespace]) for index in left]
                names = {index: self._keys.block(keys[index], one) for index, one in named if one is not None}
                if not names:
                    break
                present, current = self._exist(names, {keys[index].namespace for index in names})
                left = [index for index in names if current[keys[index].namespace] != used[keys[index].namespace]]
                for index in names.keys() - set(left):
                    found[index] = present[index]
                if not left:
                    break
        return found

    def get_many(self, reads: Sequence[Read]) -> list[Outcome]:
        """Up to eight values under way per node; each is checked against its checksum before it counts."""
        started_s = time.monotonic()
        jobs = [ReadJob(b"", read.key, read.into) for read in reads]
        try:
            with self._call():
                self._get(jobs)
        except TierUnavailable as error:
            settle(jobs, error)
        outcomes = [job.outcome for job in jobs]
        nbytes = sum(len(job.into) for job in jobs if job.outcome is None)
        self._counters.reads(outcomes, nbytes=nbytes, seconds=time.monotonic() - started_s)
        return outcomes

    def put_many(self, writes: Sequence[Write]) -> list[Outcome]:
        """One SET each, so a value is there wholly or not at all."""
        started_s = time.monotonic()
        jobs = [WriteJob(b"", write.key, write.data, write.itemsize) for write in writes]
        try:
            with self._room.guard(), self._call():
                self._put(jobs, [write.generation for write in writes])
                if (full := next((job.outcome for job in jobs if isinstance(job.outcome, TierFull)), None)) is not None:
                    raise full
        except TierUnavailable as error:
            settle(jobs, error)
        except TierFull as error:
            # Raised above for the breaker's sake, after the generations were confirmed; or by it, before anything was.
            for job in jobs:
                job.outcome = error if job.outcome is UNANSWERED else job.outcome
        outcomes = [job.outcome for job in jobs]
        nbytes = sum(len(job.data) for job in jobs if job.outcome is None)
        self._counters.writes(outcomes, nbytes=nbytes, seconds=time.monotonic() - started_s)
        return outcomes

    def delete(self, keys: Sequence[TierKey]) -> int:
        """UNLINK: the server frees the memory in a thread of its own."""
        with self._counting(), self._call():
            used = self._known_generations(key.namespace for key in keys)
            named = [(key, used[key.namespace]) for key in keys]
            names = [self._keys.block(key, one) for key, one in named if one is not None]
            num_deleted = sum(count == 1 for count in self._run([("UNLINK", name) for name in names]))
        self._counters.deletes(num_deleted)
        return num_deleted

    def flush(self, namespace: NamespaceDigest, name: NamespaceName | None = None) -> Generation:
        """A new generation first, which makes it final; then the old values are deleted, as far as Redis lets us."""
        (outcome,) = self.flush_many([namespace], None if name is None else {namespace: name})
        if isinstance(outcome, TierError):
            raise outcome
        return outcome

    def flush_many(
        self, namespaces: Sequence[NamespaceDigest], names: Names | None = None
    ) -> list[Generation | TierError]:
        """As `flush`; all keys are looked at once for all of them."""
        names = names or {}
        outcomes: dict[NamespaceDigest, Generation | TierError] = {}
        for namespace in namespaces:
            generation = self._generations.begin_flush(namespace, names.get(namespace))
            try:
                with self._counting():
                    self._prepare_flush(namespace, generation)
                outcomes[namespace] = generation
            except TierError as error:
                outcomes[namespace] = error
        prepared = {one: outcome for one, outcome in outcomes.items() if not isinstance(outcome, TierError)}
        if prepared:
            try:
                with self._counting(), self._call():  # tells Redis
                    self._sweep(prepared)
            except TierError as error:
                outcomes |= dict.fromkeys(prepared, error)
        return [outcomes[namespace] for namespace in namespaces]

    def was_flushed(self, namespace: NamespaceDigest) -> bool:
        """As in the contract: the record in Redis says so."""
        return self._generations.was_flushed(namespace)

    def take_flushed(self) -> list[NamespaceDigest]:
        """As in the contract."""
        return self._generations.take_flushed()

    def usage(self) -> TierUsage:
        """Counts the values under our prefix, whoever wrote them: right after a restart and after expiry, too."""
        num_blocks = used_nbytes = 0
        spaces: set[bytes] = set()
        with self._counting(), self._call():
            for page in self._nodes.control.scan(self._keys.pattern()):
                lengths = self._nodes.control.run([("STRLEN", key) for key in page])
                sizes = [int(one) for one in lengths if isinstance(one, int) and one > 0]
                spaces.update(map(self._keys.space_of, page))
                num_blocks += len(sizes)
                used_nbytes += sum(sizes)
            limit = self._nodes.control.max_memory_nbytes()
            if not self._records_expire:
                self._records.drop_idle(spaces)
        return self._counters.measured(TierUsage(num_blocks=num_blocks, used_nbytes=used_nbytes, budget_nbytes=limit))

    def status(self) -> TierStatus:
        """Asks nothing: counters, breaker, and what was learnt last."""
        view = self._breaker.view()
        return self._counters.status(
            name=self.name,
            kind="redis",
            address=str(self._address),
            state="down" if self._closed else view.state.value,
            reason="closed" if self._closed else view.reason,
            retry_in_s=view.retry_in_s,
            details=self.details(),
        )

    def is_answering(self) -> bool:
        """As in the contract: not while the breaker is open."""
        return not self._closed and self._breaker.may_enter()

    def details(self) -> dict[str, str]:
        """The part of the status that only a Redis has. Asks nothing either."""
        room, server = self._room.view(), self._nodes.server
        details = {"codec": self._options.codec, "ttl_s": str(self._options.ttl_s), "prefix": self._options.prefix}
        if server is not None:
            details |= {"server": server.name, "version": server.version}
        if room.state is not BreakerState.CLOSED:
            details["writes"] = room.reason
        return details

    def close(self) -> None:
        """Calls that run end by themselves; their connections are closed then."""
        self._closed = True
        self._nodes.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around every call that needs Redis: breaker, identity check after a failure, flushes it was not told yet."""
        if self._closed:
            raise TierUnavailable(f"the {self.name} tier is closed", cause="closed")
        with self._breaker.guard():
            self._nodes.ensure_checked()
            self._tell_flushes_to_redis()
            try:
                yield
            except TierUnavailable:
                self._nodes.distrust()
                raise

    def _prepare_flush(self, namespace: NamespaceDigest, generation: Generation) -> None:
        if self._on_flush is not None:
            self._on_flush(namespace, generation)

    def _tell_flushes_to_redis(self) -> None:
        for namespace, (generation, name) in self._generations.pending().items():
            try:
                # Redis is never told of a flush that a crash could undo.
                self._prepare_flush(namespace, generation)
            except TierError as error:
                self._counters.error(error)
                continue  # it stays pending; other namespaces need not wait for it
            self._records.flushed(namespace, generation, name)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except TierError as error:
            self._counters.error(error)
            raise

    def _run(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[object]:
        """Control commands of which each must succeed."""
        results = self._nodes.control.run(commands) if commands else []
        for result in results:
            if isinstance(result, TierError):
                raise result
        return results

    def _exist(
        self, names: Mapping[int, bytes], namespaces: set[NamespaceDigest]
    ) -> tuple[dict[int, bool], dict[NamespaceDigest, Generation | None]]:
        """Which of these values exist, and, read after them in the same round trip, the generations."""
        commands: dict[int | NamespaceDigest, Keyed] = {
            index: (name, command(b"EXISTS", name)) for index, name in names.items()
        }
        spaces = list(namespaces)
        commands |= dict(zip(spaces, self._records.commands(spaces), strict=True))
        replies = self._nodes.ask_each(commands)
        return {index: replies.get(index) == 1 for index in names}, self._records.observed(namespaces, replies)

    def _known_generations(self, namespaces: Iterable[NamespaceDigest]) -> dict[NamespaceDigest, Generation | None]:
        """The generations to look under: from the last contact, else asked now."""
        known = {one: self._generations.known(one) for one in set(namespaces)}
        if unknown := [one for one, generation in known.items() if generation is None]:
            known |= self._records.read(unknown)
        return known

    def _get(self, jobs: Sequence[ReadJob]) -> None:
        used = self._known_generations(job.key.namespace for job in jobs)
        for job in jobs:
            if (generation := used[job.key.namespace]) is None:
                job.outcome = BlockMissing("Redis holds nothing of the namespace")
            else:
                job.redis_key = self._keys.block(job.key, generation)
        asked = [job for job in jobs if job.redis_key]
        spaces = sorted({job.key.namespace for job in asked})
        records = self._nodes.fetch(
            asked,
            ttl_s=self._options.ttl_s,
            timeout_s=self._bulk_timeout_s(len(job.into) for job in asked),
            tail=self._records.commands(spaces),
        )
        current = {one: self._generations.observe(one, record) for one, record in zip(spaces, records, strict=True)}
        bad: list[bytes] = []
        for job in asked:
            if isinstance(job.outcome, BlockCorrupt):
                bad.append(job.redis_key)
            elif job.outcome is None and current[job.key.namespace] != used[job.key.namespace]:
                job.outcome = BlockMissing("the namespace was flushed", cause="flushed")
        self._unlink(bad)

    def _put(self, jobs: Sequence[WriteJob], generations: Sequence[Generation]) -> None:
        asked: list[tuple[WriteJob, Generation]] = []
        for job, generation in zip(jobs, generations, strict=True):
            stale = self._generations.stale(job.key.namespace, generation)
            if stale is not None:
                job.outcome = stale
            elif len(job.data) > _MAX_VALUE_NBYTES:
                job.outcome = TierFull(f"a block of {len(job.data)} bytes is over Redis's limit", cause="too-large")
            else:
                job.redis_key = self._keys.block(job.key, generation)
                asked.append((job, generation))
        spaces = sorted({job.key.namespace for job, _ in asked})
        records = self._nodes.store(
            [job for job, _ in asked],
            codec=self._codec,
            ttl_s=self._options.ttl_s,
            timeout_s=self._bulk_timeout_s(len(job.data) for job, _ in asked),
            tail=self._records.commands(spaces),
        )
        for namespace, record in zip(spaces, records, strict=True):
            self._generations.observe(namespace, record)
        unreadable: list[bytes] = []
        for job, generation in asked:
            stale = self._generations.stale(job.key.namespace, generation)
            if job.outcome is None and stale is not None:
                job.outcome = stale
                unreadable.append(job.redis_key)
        self._unlink(unreadable)

    def _bulk_timeout_s(self, sizes: Iterable[int]) -> float:
        return self._options.bulk_timeout_s + max(sizes, default=0) / self._options.bulk_nbytes_per_s

    def _sweep(self, flushed: Mapping[NamespaceDigest, Generation]) -> None:
        """Deletes all values of these namespaces that are not of the generations they have now."""
        spaces = {self._keys.space(namespace): namespace for namespace in flushed}
        only = next(iter(flushed)) if len(flushed) == 1 else None
        for page in self._nodes.control.scan(self._keys.pattern(only)):
            named = [(key, spaces.get(self._keys.space_of(key))) for key in page]
            self._unlink([key for key, one in named if one and not self._keys.is_of(key, one, flushed[one])])

    def _unlink(self, names: Sequence[bytes]) -> None:
        """Delete what nobody may read anyway; a failure only leaves it to its time to live."""
        if not names:
            return
        try:
            for result in self._nodes.control.run([("UNLINK", name) for name in names]):
                if isinstance(result, TierError):
                    self._counters.error(result)
        except TierUnavailable as error:
            self._counters.error(error)
