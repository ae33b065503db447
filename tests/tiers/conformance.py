"""What every tier does. A tier's test class inherits these and gives a `tier` fixture: an empty, well tier."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt, BlockMissing, StaleGeneration, TierUnavailable
from kvd.tiers.base import Read, Tier, TierKey, Write
from kvd.tiers.names import MAX_TEXT_NBYTES, name_of

BLOCK_NBYTES = 8192


def new_namespace() -> NamespaceDigest:
    return NamespaceDigest(os.urandom(32))


def new_key(namespace: NamespaceDigest) -> TierKey:
    return TierKey(namespace, ChainHash(os.urandom(32)))


def new_block(nbytes: int = BLOCK_NBYTES) -> memoryview:
    return memoryview(os.urandom(nbytes)).toreadonly()


def empty(nbytes: int = BLOCK_NBYTES) -> memoryview:
    return memoryview(bytearray(nbytes))


def fetched(tier: Tier, key: TierKey, nbytes: int = BLOCK_NBYTES) -> bytes:
    into = empty(nbytes)
    tier.get(key, into)
    return bytes(into)


class TierConformance:
    """Inherit, and give a `tier` fixture."""

    @pytest.fixture
    def namespace(self) -> NamespaceDigest:
        return new_namespace()

    @pytest.mark.parametrize("nbytes", [4096, 12288, 1 << 20, 2 << 20])
    def test_what_was_put_is_what_is_got(self, tier: Tier, namespace: NamespaceDigest, nbytes: int):
        key, data = new_key(namespace), new_block(nbytes)
        tier.put(key, data, generation=tier.generation(namespace))
        assert fetched(tier, key, nbytes) == data

    def test_an_unknown_block_is_missing(self, tier: Tier, namespace: NamespaceDigest):
        with pytest.raises(BlockMissing):
            tier.get(new_key(namespace), empty())
        tier.generation(namespace)
        with pytest.raises(BlockMissing):
            tier.get(new_key(namespace), empty())

    def test_contains_answers_for_each_key_in_order(self, tier: Tier, namespace: NamespaceDigest):
        keys = [new_key(namespace) for _ in range(300)]
        generation = tier.generation(namespace)
        assert tier.put_many([Write(key, new_block(4096), generation) for key in keys[::3]]) == [None] * 100
        assert tier.contains(keys) == [index % 3 == 0 for index in range(300)]

    def test_asking_for_nothing_gives_nothing(self, tier: Tier):
        assert tier.contains([]) == []
        assert tier.get_many([]) == []
        assert tier.put_many([]) == []
        assert tier.delete([]) == 0

    def test_a_missing_block_costs_only_itself(self, tier: Tier, namespace: NamespaceDigest):
        # case C7
        keys, blocks = [new_key(namespace) for _ in range(20)], [new_block() for _ in range(20)]
        generation = tier.generation(namespace)
        tier.put_many([Write(key, data, generation) for key, data in zip(keys, blocks, strict=True)])
        tier.delete([keys[7]])
        targets = [empty() for _ in keys]
        outcomes = tier.get_many([Read(key, into) for key, into in zip(keys, targets, strict=True)])
        assert [index for index, one in enumerate(outcomes) if one is not None] == [7]
        assert isinstance(outcomes[7], BlockMissing)
        assert [bytes(t) for i, t in enumerate(targets) if i != 7] == [bytes(b) for i, b in enumerate(blocks) if i != 7]
        tier.put(keys[7], blocks[7], generation=generation)
        assert fetched(tier, keys[7]) == blocks[7]

    def test_one_hash_in_two_namespaces_is_two_blocks(self, tier: Tier, namespace: NamespaceDigest):
        # case A4
        key, data = new_key(namespace), new_block()
        other = TierKey(new_namespace(), key.chain_hash)
        tier.put(key, data, generation=tier.generation(namespace))
        assert tier.contains([key, other]) == [True, False]
        with pytest.raises(BlockMissing):
            tier.get(other, empty())

    def test_storing_twice_is_no_fault(self, tier: Tier, namespace: NamespaceDigest):
        key, data, generation = new_key(namespace), new_block(), tier.generation(namespace)
        tier.put(key, data, generation=generation)
        tier.put(key, data, generation=generation)
        assert fetched(tier, key) == data
        assert tier.delete([key]) == 1

    def test_delete_tells_how_many_were_there(self, tier: Tier, namespace: NamespaceDigest):
        keys, generation = [new_key(namespace) for _ in range(3)], tier.generation(namespace)
        tier.put_many([Write(key, new_block(), generation) for key in keys[:2]])
        assert tier.delete(keys) == 2
        assert tier.contains(keys) == [False] * 3

    def test_another_length_is_refused_and_the_value_dropped(self, tier: Tier, namespace: NamespaceDigest):
        key = new_key(namespace)
        tier.put(key, new_block(), generation=tier.generation(namespace))
        with pytest.raises(BlockCorrupt):
            tier.get(key, empty(BLOCK_NBYTES // 2))
        assert tier.contains([key]) == [False]

    def test_the_generation_stays_until_a_flush(self, tier: Tier, namespace: NamespaceDigest):
        before = tier.generation(namespace)
        assert tier.generation(namespace) == before
        after = tier.flush(namespace)
        assert after != before
        assert tier.generation(namespace) == after

    def test_the_generations_of_many_are_those_of_each(self, tier: Tier, namespace: NamespaceDigest):
        known, flushed = namespace, new_namespace()
        tier.generation(known)
        tier.flush(flushed)
        asked = [known, new_namespace(), flushed, known]
        told = tier.generations(asked)
        assert told == [tier.generation(one) for one in asked]
        assert tier.generations([]) == []

    def test_a_flush_ends_every_block_of_that_namespace_alone(self, tier: Tier, namespace: NamespaceDigest):
        # case A9
        other = new_namespace()
        keys, kept = [new_key(namespace) for _ in range(5)], new_key(other)
        generation = tier.generation(namespace)
        tier.put_many([Write(key, new_block(), generation) for key in keys])
        tier.put(kept, new_block(), generation=tier.generation(other))
        tier.flush(namespace)
        assert tier.contains(keys) == [False] * 5
        assert {type(one) for one in tier.get_many([Read(key, empty()) for key in keys])} == {BlockMissing}
        assert tier.contains([kept]) == [True]

    def test_a_spill_that_began_before_a_flush_stores_nothing(self, tier: Tier, namespace: NamespaceDigest):
        # case A9
        key, stale, fresh = new_key(namespace), new_block(), new_block()
        before = tier.generation(namespace)
        after = tier.flush(namespace)
        with pytest.raises(StaleGeneration) as caught:
            tier.put(key, stale, generation=before)
        assert caught.value.cause == "flushed"
        assert tier.contains([key]) == [False]
        tier.put(key, fresh, generation=after)
        assert fetched(tier, key) == fresh

    def test_a_named_namespace_is_listed_once_it_has_blocks(self, tier: Tier, namespace: NamespaceDigest):
        # case A9: whoever flushes all need not have opened it.
        name, unnamed = name_of(namespace, tenant="gid:7", model="m" * 2000, engine="e/1"), new_namespace()
        generation = tier.generation(namespace, name)
        tier.put(new_key(namespace), new_block(), generation=generation)
        tier.put(new_key(unnamed), new_block(), generation=tier.generation(unnamed))
        assert tier.generation(namespace, name) == generation
        assert [one for one in tier.names() if one.namespace in {namespace, unnamed}] == [name]

    def test_the_longest_name_there_can_be_is_kept(self, tier: Tier, namespace: NamespaceDigest):
        long = "\x01" * MAX_TEXT_NBYTES
        name = name_of(namespace, tenant="uid:1", model=long, engine=long, adapter=long)
        key, data = new_key(namespace), new_block()
        tier.put(key, data, generation=tier.generation(namespace, name))
        tier.generations([namespace, new_namespace()])
        assert tier.status().state == "up"
        assert fetched(tier, key) == data
        assert name in tier.names()

    def test_a_name_that_comes_late_changes_nothing_else(self, tier: Tier, namespace: NamespaceDigest):
        key, data, generation = new_key(namespace), new_block(), tier.generation(namespace)
        tier.put(key, data, generation=generation)
        name = name_of(namespace, tenant="uid:1", model="ü")
        assert tier.generations([namespace], {namespace: name}) == [generation]
        assert fetched(tier, key) == data
        assert name in tier.names()

    def test_a_name_outlives_a_flush_once_there_are_blocks_again(self, tier: Tier, namespace: NamespaceDigest):
        name = name_of(namespace, tenant="uid:1", model="model")
        tier.generation(namespace, name)
        tier.put(new_key(namespace), new_block(), generation=tier.flush(namespace, name))
        assert name in tier.names()
        tier.flush(namespace)
        tier.put(new_key(namespace), new_block(), generation=tier.generation(namespace, name))
        assert name in tier.names()

    def test_many_are_flushed_together(self, tier: Tier):
        spaces = [new_namespace() for _ in range(5)]
        keys = [new_key(one) for one in spaces]
        before = tier.generations(spaces)
        tier.put_many([Write(key, new_block(), tier.generation(key.namespace)) for key in keys])
        after = tier.flush_many(spaces[:4])
        assert after == tier.generations(spaces[:4])
        assert all(new != old for new, old in zip(after, before, strict=False))
        assert tier.contains(keys) == [False] * 4 + [True]
        assert tier.usage().num_blocks == 1
        assert tier.flush_many([]) == []

    def test_counters_tell_what_happened(self, tier: Tier, namespace: NamespaceDigest):
        keys, generation = [new_key(namespace) for _ in range(3)], tier.generation(namespace)
        tier.put_many([Write(key, new_block(), generation) for key in keys[:2]])
        tier.get_many([Read(key, empty()) for key in keys])
        tier.delete(keys)
        status = tier.status()
        assert (status.num_puts, status.num_hits, status.num_misses, status.num_deletes) == (2, 2, 1, 2)
        assert (status.written_nbytes, status.read_nbytes) == (2 * BLOCK_NBYTES, 2 * BLOCK_NBYTES)
        assert (status.state, status.errors) == ("up", {})

    def test_usage_is_what_is_there(self, tier: Tier, namespace: NamespaceDigest):
        # case C6
        keys, generation = [new_key(namespace) for _ in range(4)], tier.generation(namespace)
        assert tier.usage().num_blocks == 0
        tier.put_many([Write(key, new_block(), generation) for key in keys])
        assert tier.usage().num_blocks == 4
        assert tier.usage().used_nbytes >= 4 * BLOCK_NBYTES
        tier.delete(keys[:1])
        usage = tier.usage()
        assert usage.num_blocks == 3
        assert tier.status().usage == usage

    def test_threads_do_not_mix_blocks_up(self, tier: Tier, namespace: NamespaceDigest):
        generation = tier.generation(namespace)

        def work(_: int) -> bool:
            keys, blocks = [new_key(namespace) for _ in range(10)], [new_block() for _ in range(10)]
            written = tier.put_many([Write(key, data, generation) for key, data in zip(keys, blocks, strict=True)])
            targets = [empty() for _ in keys]
            read = tier.get_many([Read(key, into) for key, into in zip(keys, targets, strict=True)])
            return written == read == [None] * 10 and targets == blocks

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(12)))

    def test_a_closed_tier_is_unavailable_and_says_so(self, tier: Tier, namespace: NamespaceDigest):
        key, generation = new_key(namespace), tier.generation(namespace)
        tier.close()
        tier.close()
        for call in (
            lambda: tier.generation(namespace),
            lambda: tier.contains([key]),
            lambda: tier.get(key, empty()),
            lambda: tier.put(key, new_block(), generation=generation),
            lambda: tier.delete([key]),
            lambda: tier.flush(namespace),
            tier.names,
            tier.usage,
        ):
            with pytest.raises(TierUnavailable) as caught:
                call()
            assert caught.value.cause == "closed"
        assert tier.status().state == "down"
