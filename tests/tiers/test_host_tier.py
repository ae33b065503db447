"""What only the host tier does: budget, eviction, sizes beside each other, copies under way while things change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from kvd.block import NamespaceDigest
from kvd.errors import BlockMissing, ConfigError, OutOfMemory, StaleGeneration, StateError, TierFull, TierUnavailable
from kvd.memory import HostSegment
from kvd.tiers import host
from kvd.tiers.base import Read, TierKey, Write
from kvd.tiers.host import HostTier
from kvd.tiers.host_slots import Slot
from kvd.tiers.stack import Stack
from tests.tiers.conformance import empty, fetched, new_block, new_key, new_namespace

SEGMENT_NBYTES = 64 << 10
BLOCK_NBYTES = 16 << 10  # four to a segment


@pytest.fixture
def namespace() -> NamespaceDigest:
    return new_namespace()


@pytest.fixture
def made() -> list[HostSegment]:
    return []


@pytest.fixture
def tier(made: list[HostSegment]) -> Iterator[HostTier]:
    def make(nbytes: int) -> HostSegment:
        made.append(HostSegment(nbytes))
        return made[-1]

    tier = HostTier(make_segment=make, budget_nbytes=2 * SEGMENT_NBYTES, segment_nbytes=SEGMENT_NBYTES)
    yield tier
    tier.check_integrity() if tier.status().state == "up" else None
    tier.close()
    assert all(segment.closed for segment in made)


def put(tier: HostTier, *keys: TierKey, nbytes: int = BLOCK_NBYTES) -> None:
    for key in keys:
        tier.put(key, new_block(nbytes), generation=tier.generation(key.namespace))


def test_the_least_recently_used_block_goes_first(tier: HostTier, namespace):
    keys = [new_key(namespace) for _ in range(8)]
    put(tier, *keys)
    fetched(tier, keys[0], BLOCK_NBYTES)
    late = [new_key(namespace) for _ in range(2)]
    put(tier, *late)
    # 1 and 2 are the oldest, since 0 was used again
    assert tier.contains(keys) == [True, False, False, True, True, True, True, True]
    assert tier.contains(late) == [True, True]
    assert tier.usage().used_nbytes == 2 * SEGMENT_NBYTES


def test_status_does_not_wait_for_whoever_holds_the_lock(tier: HostTier, namespace):
    put(tier, new_key(namespace))
    with tier._lock:  # as a flush does while it looks at every key
        asking = threading.Thread(target=lambda: (tier.status(), Stack([tier]).is_answering()))
        asking.start()
        asking.join(10)
        assert not asking.is_alive()
    assert tier.status().usage.num_blocks == 1
    assert tier.status().usage.used_nbytes == SEGMENT_NBYTES


def test_a_budget_overrun_is_a_defect(tier: HostTier, namespace, monkeypatch):
    put(tier, new_key(namespace))
    with monkeypatch.context() as shrunk:
        shrunk.setattr(tier, "_budget_nbytes", SEGMENT_NBYTES - 1)
        with pytest.raises(StateError):
            tier.check_integrity()


def test_a_closed_tier_does_not_answer(tier: HostTier):
    assert tier.is_answering()
    tier.close()
    assert not tier.is_answering()


def test_asking_is_not_using(tier: HostTier, namespace):
    keys = [new_key(namespace) for _ in range(8)]
    put(tier, *keys)
    assert tier.contains(keys) == [True] * 8
    put(tier, new_key(namespace))
    assert tier.contains(keys)[0] is False


def test_memory_moves_to_another_block_size_by_whole_segments(tier: HostTier, made, namespace):
    # case D5
    small = [new_key(namespace) for _ in range(8)]
    put(tier, *small)
    large = [new_key(namespace) for _ in range(2)]
    put(tier, *large, nbytes=SEGMENT_NBYTES // 2)
    # the first segment was colder than the second, and gave way whole
    assert tier.contains(small) == [False] * 4 + [True] * 4
    assert tier.contains(large) == [True, True]
    assert [segment.closed for segment in made] == [True, False, False]
    put(tier, *[new_key(namespace) for _ in range(4)])
    assert tier.contains(large) == [True, True]  # younger than the small ones that went
    put(tier, new_key(namespace))
    assert tier.contains(large) == [False, False]  # older than any small one that is left


def test_no_memory_for_another_segment_evicts_instead(namespace):
    segments = iter([HostSegment(SEGMENT_NBYTES)])

    def make(nbytes: int) -> HostSegment:
        try:
            return next(segments)
        except StopIteration:
            raise OutOfMemory("the machine is full") from None

    with HostTier(make_segment=make, budget_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES) as tier:
        keys = [new_key(namespace) for _ in range(6)]
        put(tier, *keys)
        assert tier.contains(keys) == [False, False, True, True, True, True]
        assert tier.status().errors["out-of-memory"] >= 1


def test_no_memory_at_all_is_full(namespace):
    def make(nbytes: int) -> HostSegment:
        raise OutOfMemory("the machine is full")

    with HostTier(make_segment=make, budget_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES) as tier:
        with pytest.raises(TierFull):
            put(tier, new_key(namespace))
        assert tier.usage().used_nbytes == 0
        tier.check_integrity()


def test_a_block_above_a_segment_never_fits(tier: HostTier, namespace):
    with pytest.raises(TierFull):
        put(tier, new_key(namespace), nbytes=SEGMENT_NBYTES + 4096)
    with pytest.raises(ConfigError):
        HostTier(make_segment=HostSegment, budget_nbytes=100, segment_nbytes=SEGMENT_NBYTES)


class HeldCopy:
    """Holds the host tier's next pread or pwrite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        real: Callable[[Slot, memoryview], None] = getattr(host, name)

        def held(slot: Slot, view: memoryview) -> None:
            if not self.entered.is_set():
                self.entered.set()
                assert self.released.wait(10)
            real(slot, view)

        monkeypatch.setattr(host, name, held)

    def run(self, work: Callable[[], object], meanwhile: Callable[[], None]) -> object:
        """The result (or exception) of `work`, with `meanwhile` done while its copy is held."""
        results: list[object] = []

        def target() -> None:
            try:
                results.append(work())
            except Exception as error:  # noqa: BLE001 - handed to the test
                results.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        try:
            assert self.entered.wait(10)
            meanwhile()
        finally:
            self.released.set()
            thread.join(10)
        return results[0]


def test_a_block_being_read_is_not_overwritten(tier: HostTier, namespace, monkeypatch):
    # case C2
    keys, data = [new_key(namespace) for _ in range(8)], new_block(BLOCK_NBYTES)
    tier.put(keys[0], data, generation=tier.generation(namespace))
    put(tier, *keys[1:])
    into = empty(BLOCK_NBYTES)

    def meanwhile() -> None:
        tier.delete(keys[:1])
        put(tier, *[new_key(namespace) for _ in range(10)])

    outcome = HeldCopy(monkeypatch, "_pread").run(lambda: tier.get_many([Read(keys[0], into)]), meanwhile)
    assert outcome == [None]
    assert into == data
    assert tier.contains(keys[:1]) == [False]
    tier.check_integrity()


def test_a_block_being_read_is_not_evicted(tier: HostTier, namespace, monkeypatch):
    # case C2
    keys = [new_key(namespace) for _ in range(8)]
    put(tier, *keys)

    def meanwhile() -> None:
        for key in keys[1:]:
            tier.get(key, empty(BLOCK_NBYTES))
        put(tier, new_key(namespace))

    outcome = HeldCopy(monkeypatch, "_pread").run(
        lambda: tier.get_many([Read(keys[0], empty(BLOCK_NBYTES))]), meanwhile
    )
    assert outcome == [None]
    assert tier.contains(keys) == [True, False, *[True] * 6]


def test_a_flush_during_a_put_wins(tier: HostTier, namespace, monkeypatch):
    # case A9
    key, old = new_key(namespace), tier.generation(namespace)
    outcome = HeldCopy(monkeypatch, "_pwrite").run(
        lambda: tier.put_many([Write(key, new_block(BLOCK_NBYTES), old)])[0], lambda: tier.flush(namespace)
    )
    assert isinstance(outcome, StaleGeneration)
    assert tier.contains([key]) == [False]
    tier.check_integrity()


def test_a_block_being_written_is_found_by_nobody(tier: HostTier, namespace, monkeypatch):
    # case C2
    key, data, generation = new_key(namespace), new_block(BLOCK_NBYTES), tier.generation(namespace)

    def meanwhile() -> None:
        assert tier.contains([key]) == [False]
        with pytest.raises(BlockMissing):
            tier.get(key, empty(BLOCK_NBYTES))
        tier.put(key, data, generation=generation)

    outcome = HeldCopy(monkeypatch, "_pwrite").run(lambda: tier.put_many([Write(key, data, generation)]), meanwhile)
    assert outcome == [None]
    assert fetched(tier, key, BLOCK_NBYTES) == data
    assert tier.usage().num_blocks == 1


def test_a_copy_that_fails_gives_its_slot_back(tier: HostTier, namespace, monkeypatch):
    # case C3
    def broken(fd: int, data: object, offset: int) -> int:
        raise OSError(5, "input/output error")

    key = new_key(namespace)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        with pytest.raises(TierUnavailable) as caught:
            put(tier, key)
    assert caught.value.cause == "os-error"
    assert tier.contains([key]) == [False]
    tier.check_integrity()
    put(tier, key)


def test_close_waits_for_the_copy_under_way(tier: HostTier, namespace, monkeypatch):
    key, data = new_key(namespace), new_block(BLOCK_NBYTES)
    tier.put(key, data, generation=tier.generation(namespace))
    into = empty(BLOCK_NBYTES)
    closer = threading.Thread(target=tier.close)
    outcome = HeldCopy(monkeypatch, "_pread").run(lambda: tier.get_many([Read(key, into)]), closer.start)
    closer.join(10)
    assert not closer.is_alive()
    assert outcome == [None]
    assert into == data
