"""Any order of puts, gets, deletes, flushes and restarts, against a set: never a wrong byte, never a flushed one."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockMissing, StaleGeneration
from kvd.memory import HostSegment
from kvd.tiers.base import Generation, Read, Tier, TierKey, Write
from kvd.tiers.host import HostTier
from kvd.tiers.redis_tier import RedisOptions, RedisTier
from kvd.tiers.redis_url import parse_redis_url
from tests.support.redis_servers import RealServer

_runs = itertools.count()
NAMESPACES = [NamespaceDigest(hashlib.sha256(b"%d" % number).digest()) for number in range(2)]
KEYS = [
    TierKey(namespace, ChainHash(hashlib.sha256(b"block %d" % number).digest()))
    for namespace in NAMESPACES
    for number in range(6)
]
NBYTES = {key: 4096 if index % 3 else 8192 for index, key in enumerate(KEYS)}

keys = st.sampled_from(KEYS)
some_keys = st.lists(keys, unique=True, min_size=1, max_size=8)
namespaces = st.sampled_from(NAMESPACES)


class Machine(RuleBasedStateMachine):
    """`epochs` counts the flushes of a namespace; a block's bytes name the epoch it was computed in."""

    may_evict = False
    num_daemons = 1
    make_tier: Callable[[Machine], Tier]
    """Each machine's own."""

    @initialize()
    def start(self) -> None:
        self.run = next(_runs)
        self.tiers = [self.make_tier() for _ in range(self.num_daemons)]
        self.epochs = dict.fromkeys(NAMESPACES, 0)
        self.stored: set[TierKey] = set()
        self.learnt = [{one: (0, tier.generation(one)) for one in NAMESPACES} for tier in self.tiers]

    def teardown(self) -> None:
        for tier in getattr(self, "tiers", []):
            tier.close()

    def bytes_of(self, key: TierKey, epoch: int) -> bytes:
        return hashlib.sha256(b"%s %s %d" % (*key, epoch)).digest() * (NBYTES[key] // 32)

    def daemons(self) -> st.SearchStrategy[int]:
        return st.integers(0, self.num_daemons - 1)

    @rule(wanted=some_keys, data=st.data())
    def put(self, wanted: list[TierKey], data: st.DataObject) -> None:
        who = data.draw(self.daemons())
        writes, fresh = [], []
        for key in wanted:
            epoch, generation = self.learnt[who][key.namespace]
            writes.append(Write(key, memoryview(self.bytes_of(key, epoch)), generation))
            fresh.append(epoch == self.epochs[key.namespace])
        for key, is_fresh, outcome in zip(wanted, fresh, self.tiers[who].put_many(writes), strict=True):
            if is_fresh:
                assert outcome is None
                self.stored.add(key)
            else:
                assert isinstance(outcome, StaleGeneration)
                assert outcome.cause == "flushed"

    @rule(wanted=some_keys, data=st.data())
    def get(self, wanted: list[TierKey], data: st.DataObject) -> None:
        who = data.draw(self.daemons())
        targets = [memoryview(bytearray(NBYTES[key])) for key in wanted]
        outcomes = self.tiers[who].get_many([Read(*pair) for pair in zip(wanted, targets, strict=True)])
        for key, into, outcome in zip(wanted, targets, outcomes, strict=True):
            if outcome is None:
                assert key in self.stored
                assert into == self.bytes_of(key, self.epochs[key.namespace])
            else:
                assert isinstance(outcome, BlockMissing)
                # A get that meets another daemon's flush may miss what was stored since: once, never twice.
                assert (
                    self.may_evict
                    or key not in self.stored
                    or self.learnt[who][key.namespace][0] != self.epochs[key.namespace]
                )

    @rule(wanted=some_keys, data=st.data())
    def contains(self, wanted: list[TierKey], data: st.DataObject) -> None:
        found = self.tiers[data.draw(self.daemons())].contains(wanted)
        expected = [key in self.stored for key in wanted]
        assert found == expected or (self.may_evict and all(map(lambda f, e: e or not f, found, expected)))

    @rule(wanted=some_keys, data=st.data())
    def delete(self, wanted: list[TierKey], data: st.DataObject) -> None:
        who = data.draw(self.daemons())
        self.learn(who)
        num_deleted = self.tiers[who].delete(wanted)
        expected = len(self.stored & set(wanted))
        assert num_deleted == expected or (self.may_evict and num_deleted < expected)
        self.stored -= set(wanted)

    @rule(namespace=namespaces, data=st.data())
    def flush(self, namespace: NamespaceDigest, data: st.DataObject) -> None:
        who = data.draw(self.daemons())
        generation = self.tiers[who].flush(namespace)
        self.epochs[namespace] += 1
        self.learnt[who][namespace] = (self.epochs[namespace], generation)
        self.stored = {key for key in self.stored if key.namespace != namespace}

    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        self.learn(data.draw(self.daemons()))

    def learn(self, who: int) -> None:
        """What a daemon does when it opens the namespaces anew."""
        for namespace in NAMESPACES:
            generation: Generation = self.tiers[who].generation(namespace)
            self.learnt[who][namespace] = (self.epochs[namespace], generation)

    @invariant()
    def usage_is_right(self) -> None:
        if hasattr(self, "tiers"):
            num_blocks = self.tiers[0].usage().num_blocks
            assert num_blocks == len(self.stored) or (self.may_evict and num_blocks < len(self.stored))


def run(machine: type[Machine], examples: int) -> None:
    options = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=options)


def test_host_tier_with_room_for_half_of_it():
    class HostMachine(Machine):
        may_evict = True

        def make_tier(self) -> Tier:
            return HostTier(make_segment=HostSegment, budget_nbytes=32768, segment_nbytes=16384)

        @precondition(lambda self: hasattr(self, "tiers"))
        @invariant()
        def slots_add_up(self) -> None:
            self.tiers[0].check_integrity()

    run(HostMachine, 60)


def test_two_daemons_on_one_redis(debian_redis: RealServer):
    # case A9, case C8
    class RedisMachine(Machine):
        num_daemons = 2

        def make_tier(self) -> RedisTier:
            options = RedisOptions(prefix=f"machine{self.run}:", control_timeout_s=5.0, bulk_timeout_s=5.0)
            return RedisTier(parse_redis_url(debian_redis.url, {}), options)

        @rule(data=st.data())
        def restart(self, data: st.DataObject) -> None:
            who = data.draw(self.daemons())
            self.tiers[who].close()
            self.tiers[who] = self.make_tier()
            self.learn(who)

    run(RedisMachine, 25)
