"""Several tiers as one: nearest first, down when one fails."""

from __future__ import annotations

import pytest

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import BlockCorrupt, BlockMissing, StaleGeneration, TierFull, TierUnavailable
from kvd.tiers.base import Generation, Read, TierKey
from kvd.tiers.stack import Put, Stack
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier

SPACE = NamespaceDigest(b"n" * 32)
A, B, C = (TierKey(SPACE, ChainHash(letter * 32)) for letter in (b"a", b"b", b"c"))
DATA = b"x" * 64
KNOWN = (Generation(0), Generation(0))


class Two:
    """A host tier for two blocks above a Redis."""

    def __init__(self) -> None:
        self.dicts = DictTier(name="host", max_blocks=2), DictTier(name="redis")
        self.host, self.redis = (FaultyTier(tier) for tier in self.dicts)
        self.stack = Stack([self.host, self.redis], lasting=["redis"])

    def held(self) -> tuple[set[TierKey], set[TierKey]]:
        host, redis = self.dicts
        return set(host.blocks), set(redis.blocks)

    def put(self, *keys: TierKey, lasting_only: bool = False) -> list[object]:
        return list(self.stack.put_many([Put(key, memoryview(DATA), KNOWN) for key in keys], lasting_only=lasting_only))


@pytest.fixture
def two() -> Two:
    return Two()


def test_a_block_is_put_into_every_tier_that_takes_it(two: Two) -> None:
    assert two.put(A, B, C) == [None] * 3
    assert two.held() == ({A, B}, {A, B, C})


def test_one_tier_that_takes_a_block_is_enough(two: Two) -> None:
    two.redis.fail_next("put", TierUnavailable("gone"))
    assert two.put(A) == [None]
    assert two.held() == ({A}, set())


def test_the_refusal_of_the_last_tier_is_the_outcome(two: Two) -> None:
    two.host.fail_always("put", TierUnavailable("gone"))
    two.redis.fail_always("put", TierFull("full"))
    assert isinstance(two.put(A)[0], TierFull)


def test_a_flush_that_a_near_tier_knows_of_ends_a_put(two: Two) -> None:  # case A9
    two.host.flush(SPACE)
    assert isinstance(two.put(A)[0], StaleGeneration)
    assert two.held() == (set(), set())


def test_a_flush_that_only_the_last_tier_knows_of_is_heard(two: Two) -> None:  # case A9
    two.redis.flush(SPACE)
    assert isinstance(two.put(A)[0], StaleGeneration)


def test_a_tier_whose_generation_is_unknown_gets_nothing(two: Two) -> None:
    unknown_host = [Put(A, memoryview(DATA), (None, Generation(0)))]
    assert two.stack.put_many(unknown_host) == [None]
    assert two.held() == (set(), {A})
    assert isinstance(two.stack.put_many([Put(B, memoryview(DATA), (None, None))])[0], TierUnavailable)


def test_a_drain_puts_only_where_blocks_last(two: Two) -> None:
    two.put(A, lasting_only=True)
    assert two.held() == (set(), {A})
    assert two.stack.has_lasting
    assert not Stack([two.host]).has_lasting


def test_each_tier_is_asked_once_for_what_no_nearer_one_has(two: Two) -> None:
    two.put(A)
    two.put(C, lasting_only=True)
    assert two.stack.locate([A, B, C]) == [0, None, 1]
    assert two.redis.calls.count("contains") == 1
    assert two.stack.locate([A]) == [0]
    assert two.redis.calls.count("contains") == 1


def test_a_tier_that_fails_is_passed_over(two: Two) -> None:
    two.put(A, lasting_only=True)
    two.host.fail_always("contains", TierUnavailable("gone"))
    assert two.stack.locate([A]) == [1]


def test_a_block_that_left_a_near_tier_is_fetched_from_below(two: Two) -> None:
    two.put(A, lasting_only=True)
    into = bytearray(64)
    assert two.stack.get_many([Read(A, memoryview(into))], [0]) == [None]
    assert into == DATA


def test_a_corrupt_copy_is_replaced_by_the_one_below(two: Two) -> None:
    two.put(A)
    two.put(A, lasting_only=True)
    two.host.fail_next("get", BlockCorrupt("flipped"))
    into = bytearray(64)
    assert two.stack.get_many([Read(A, memoryview(into))], [0]) == [None]
    assert into == DATA
    assert isinstance(two.stack.get_many([Read(B, memoryview(into))], [0])[0], BlockMissing)


def test_a_flush_reaches_every_tier_and_names_those_it_could_not_tell(two: Two) -> None:  # case A9
    two.put(A, B, C)
    two.redis.fail_next("flush", TierUnavailable("gone"))
    assert two.stack.flush(SPACE) == ((1, None), ["redis"])
    assert two.held() == (set(), {A, B, C})
    assert two.stack.flush(SPACE) == ((2, 1), [])
    assert two.held() == (set(), set())


def test_a_flush_of_one_tier_leaves_the_others(two: Two) -> None:
    two.put(A, B, C)
    assert two.stack.flush(SPACE, levels={0}) == ((1, 0), [])
    assert two.held() == (set(), {A, B, C})


def test_what_somebody_flushed_in_one_tier_is_flushed_in_the_others(two: Two) -> None:  # case A9
    two.put(A)
    two.dicts[1].flushed_elsewhere(SPACE)
    assert two.stack.take_flushed() == [SPACE]
    assert two.held() == (set(), set())
    assert two.stack.take_flushed() == []


def test_a_tier_that_does_not_say_its_generations_is_left_out(two: Two) -> None:
    other = NamespaceDigest(b"o" * 32)
    two.redis.flush(other)
    two.host.fail_next("generation", TierUnavailable("gone"))
    assert two.stack.generations([SPACE, other]) == [(None, 0), (0, 1)]


def test_it_answers_as_long_as_one_tier_does(two: Two) -> None:
    assert two.stack.is_answering()
    two.host.down_for_s = two.redis.down_for_s = 1.0
    assert not two.stack.is_answering()


def test_a_delete_says_whether_every_tier_heard_it(two: Two) -> None:
    two.put(A)
    assert two.stack.delete([A])
    two.host.fail_next("delete", TierUnavailable("gone"))
    assert not two.stack.delete([A])


def test_hit_rates_count_what_was_looked_for_not_only_what_was_fetched(two: Two) -> None:
    two.put(A, B, C)  # the host tier has room for two
    assert two.stack.locate([A, B, C]) == [0, 0, 1]
    absent = TierKey(SPACE, ChainHash(b"d" * 32))
    assert two.stack.locate([absent]) == [None]
    assert [(one.num_asked, one.num_found) for one in two.stack.statuses()] == [(4, 2), (2, 1)]
