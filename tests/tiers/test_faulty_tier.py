"""The fault-injecting tier does what its docstring says: other tests lean on it."""

from __future__ import annotations

import threading

import pytest

from kvd.errors import TierFull, TierUnavailable
from kvd.tiers.base import Read, Write
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier
from tests.tiers.conformance import empty, new_block, new_key, new_namespace


@pytest.fixture
def tier() -> FaultyTier:
    return FaultyTier(DictTier())


def test_one_item_of_a_batch_fails(tier: FaultyTier):
    namespace, error = new_namespace(), TierFull("full", cause="full")
    keys = [new_key(namespace) for _ in range(3)]
    tier.fail_next("put", error)
    writes = [Write(key, new_block(), tier.generation(namespace)) for key in keys]
    assert tier.put_many(writes) == [error, None, None]
    assert tier.contains(keys) == [False, True, True]
    assert tier.put_many(writes) == [None] * 3


def test_a_lost_acknowledgement(tier: FaultyTier):
    namespace, error = new_namespace(), TierUnavailable("gone")
    key = new_key(namespace)
    tier.fail_next("put", error, after=True)
    assert tier.put_many([Write(key, new_block(), tier.generation(namespace))]) == [error]
    assert tier.contains([key]) == [True]


def test_failing_until_healed(tier: FaultyTier):
    key = new_key(new_namespace())
    tier.fail_always("contains", TierUnavailable("gone"))
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            tier.contains([key])
    tier.heal()
    assert tier.contains([key]) == [False]


def test_a_call_is_held_until_released(tier: FaultyTier):
    key, results = new_key(new_namespace()), []
    with tier.hold("get") as gate:
        thread = threading.Thread(target=lambda: results.append(tier.get_many([Read(key, empty())])))
        thread.start()
        gate.wait_entered()
        assert results == []
    thread.join(10)
    assert len(results) == 1
    assert tier.calls == ["get"]
