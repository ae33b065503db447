"""The generations' records in Redis: read, made, named, listed, replaced by a flush. Of blocks it knows nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvd.block import NamespaceDigest
from kvd.errors import BlockCorrupt, TierError, TierUnavailable
from kvd.tiers.base import Generation
from kvd.tiers.names import NamespaceName
from kvd.tiers.redis_generations import Generations, name_in, new_generation, record_of, with_name
from kvd.tiers.redis_keys import RedisKeys
from kvd.tiers.redis_nodes import Keyed, RedisNodes
from kvd.tiers.resp_connection import Reply, command

MAX_RECORDS = 1 << 13
"""Of those that never expire."""

_MAX_TRIES = 4
"""Of naming a namespace that others flush at the same time."""


class RedisRecords:
    """Asks and tells Redis; what it heard is in `Generations`. Thread-safe; raises only `TierError`s.

    `ttl` are the words that give a record its time to live anew, none for records that are kept for ever.
    """

    def __init__(self, nodes: RedisNodes, keys: RedisKeys, generations: Generations, ttl: tuple[bytes, ...]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._generations = generations
        self._ttl = ttl

    def commands(self, namespaces: Sequence[NamespaceDigest]) -> list[Keyed]:
        """One a record; reading keeps it alive."""
        names = [self._keys.generation(namespace) for namespace in namespaces]
        return [(name, command(b"GETEX", name, *self._ttl)) for name in names]

    def observed(
        self, namespaces: Iterable[NamespaceDigest], replies: Mapping[Any, Reply]
    ) -> dict[NamespaceDigest, Generation | None]:
        """Takes over the answers to `commands`."""
        if missing := [one for one in namespaces if one not in replies]:
            # "Not told" must never be taken for "there is none", which would end the generation.
            raise TierUnavailable(
                f"the node that holds the generation of {len(missing)} namespaces does not answer", cause="node-down"
            )
        return {one: self._generations.observe(one, replies[one]) for one in namespaces}

    def read(self, namespaces: Iterable[NamespaceDigest]) -> dict[NamespaceDigest, Generation | None]:
        """What Redis says now."""
        spaces = list(namespaces)
        replies = self._nodes.ask_each(dict(zip(spaces, self.commands(spaces), strict=True)))
        return self.observed(spaces, replies)

    def learn(self, namespace: NamespaceDigest, name: NamespaceName | None) -> Generation:
        """Reads the record; makes one if there is none (or nonsense), and adds the name to one that has none."""
        for _ in range(_MAX_TRIES):
            known = self.read([namespace])[namespace] or self._make(namespace, name)
            if known is None:
                break
            if name is None or self._generations.is_named(namespace):
                return known
            # To the generation that is there, and never to bring back one that a flush ended meanwhile.
            self._nodes.control.amend(
                self._keys.generation(namespace), lambda record: with_name(record, name), self._ttl
            )
        raise TierUnavailable("the namespace is being flushed", cause="flushing")

    def names(self) -> list[NamespaceName]:
        """Of all records that have one. Looks at every key there is."""
        found: dict[NamespaceDigest, NamespaceName] = {}
        for page in self._nodes.control.scan(self._keys.records_pattern):
            for key, record in zip(page, self._nodes.control.run([("GET", key) for key in page]), strict=True):
                if isinstance(record, TierError) and not isinstance(record, BlockCorrupt):
                    raise record
                name = name_in(record)
                # One that does not belong there would flush another namespace than it lists.
                if name is not None and self._keys.space(name.namespace) == self._keys.space_of(key):
                    found[name.namespace] = name
        return list(found.values())

    def drop_idle(self, spaces: Collection[bytes]) -> None:
        """When there are very many, drops those of other namespaces than these; who uses one makes another.

        `spaces` are the namespaces with blocks, as they stand in names.
        """
        keys = [key for page in self._nodes.control.scan(self._keys.records_pattern) for key in page]
        if len(keys) > MAX_RECORDS:
            self._run([("UNLINK", key) for key in keys if self._keys.space_of(key) not in spaces])

    def flushed(self, namespace: NamespaceDigest, generation: Generation, name: NamespaceName | None) -> None:
        """Tells Redis of a flush, whatever generation it has."""
        record = record_of(generation, flushed=True, name=name)
        self._run([("SET", self._keys.generation(namespace), record, *self._ttl)])
        self._generations.end_flush(namespace, generation, named=name is not None)

    def _make(self, namespace: NamespaceDigest, name: NamespaceName | None) -> Generation | None:
        """The generation that is there afterwards; None while a flush of ours waits to be told."""
        key = self._keys.generation(namespace)
        record = record_of(new_generation(), flushed=False, name=name)
        # NX: of two daemons that find nothing, one wins and both read his.
        first, second = self._nodes.control.run([("SET", key, record, "NX", *self._ttl), ("GET", key)])
        for result in (first, second):
            if isinstance(result, TierError) and not isinstance(result, BlockCorrupt):
                raise result
        known = self._generations.observe(namespace, second)
        if known is None and not self._generations.is_pending(namespace):
            # What lies there is no record of ours.
            self._run([("DEL", key), ("SET", key, record, "NX", *self._ttl)])
            known = self._generations.observe(namespace, record)
        return known

    def _run(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> None:
        for result in self._nodes.control.run(commands) if commands else []:
            if isinstance(result, TierError):
                raise result
