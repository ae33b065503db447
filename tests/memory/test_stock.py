from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import OutOfMemory
from kvd.memory import HostSegment, SegmentStock

MIB = 1 << 20
TIMEOUT_S = 20.0


class Machine:
    """How much memory there is, as the test wishes, and a word each time the stock has made something or failed."""

    def __init__(self) -> None:
        self.available_nbytes = 1 << 40
        self.huge_nbytes = 0
        self.words: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stocks: list[SegmentStock] = []

    def stock(
        self, num_segments: int, *, segment_nbytes: int = MIB, prefault: str = "lazy", **more: Any
    ) -> SegmentStock:
        stock = SegmentStock(
            segment_nbytes=segment_nbytes,
            budget_nbytes=num_segments * segment_nbytes,
            prefault=prefault,  # type: ignore[arg-type]
            reserve=10 * MIB,
            on_ready=lambda: self.words.put(None),
            available=lambda: self.available_nbytes,
            free_huge_pages=lambda: self.huge_nbytes,
            **more,
        )
        self.stocks.append(stock)
        return stock

    def wait_for_words(self, count: int) -> None:
        for _ in range(count):
            self.words.get(timeout=TIMEOUT_S)


@pytest.fixture
def machine() -> Iterator[Machine]:
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    machine = Machine()
    yield machine
    for stock in machine.stocks:
        stock.close()
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_lazy_stock_makes_what_is_asked_for_and_no_more(machine: Machine) -> None:
    stock = machine.stock(8)
    stock.start()
    assert stock.take() is None
    stock.request(2)
    stock.request(2)
    machine.wait_for_words(2)
    with stock.take() as first, stock.take() as second:  # type: ignore[union-attr]
        assert first.writable_fd != second.writable_fd
        assert stock.take() is None
        assert (stock.ready_nbytes, stock.taken_nbytes) == (0, 2 * MIB)
    assert machine.words.empty()


def test_what_nobody_waits_for_any_more_is_not_made(machine: Machine) -> None:
    stock = machine.stock(8)
    stock.request(3)
    stock.withdraw()
    stock.request(1)
    stock.start()
    machine.wait_for_words(1)
    with stock.take():  # type: ignore[union-attr]
        stock.request(1)
        machine.wait_for_words(1)
        assert stock.ready_nbytes == MIB


def test_a_background_stock_has_its_first_segment_at_once_and_then_fills_the_budget(machine: Machine) -> None:
    stock = machine.stock(4, prefault="background")
    stock.start()
    assert stock.ready_nbytes >= MIB
    machine.wait_for_words(3)
    assert stock.ready_nbytes == 4 * MIB


def test_the_budget_counts_what_was_taken_until_it_comes_back(machine: Machine) -> None:
    stock = machine.stock(2)
    stock.start()
    stock.request(5)
    machine.wait_for_words(2)
    taken = [stock.take(), stock.take()]
    assert None not in taken
    assert stock.take() is None
    stock.discard(taken[0])  # type: ignore[arg-type]
    machine.wait_for_words(1)
    assert taken[0].closed  # type: ignore[union-attr]
    fresh = stock.take()
    assert fresh is not None
    assert fresh is not taken[0]  # memory never changes tenant
    for segment in (fresh, taken[1]):
        stock.discard(segment)  # type: ignore[arg-type]


def test_a_start_without_memory_is_refused(machine: Machine) -> None:  # case D1
    machine.available_nbytes = 10 * MIB
    for prefault in ("lazy", "background"):
        with pytest.raises(OutOfMemory, match="reserve of 10 MiB"):
            machine.stock(4, prefault=prefault).start()


def test_a_budget_beyond_the_real_machine_is_refused_before_memory_is_touched() -> None:  # case D1
    stock = SegmentStock(segment_nbytes=1 << 50, budget_nbytes=1 << 50, prefault="background")
    with pytest.raises(OutOfMemory, match="free memory, or lower"):
        stock.start()
    stock.close()


def test_a_shortage_is_told_once_and_ends_with_a_retry(machine: Machine) -> None:  # case D1
    stock = machine.stock(4)
    stock.start()
    machine.available_nbytes = 10 * MIB
    stock.request(1)
    machine.wait_for_words(1)
    assert stock.failed is not None
    assert "10 MiB are available" in stock.failed
    assert stock.available_nbytes() == 0
    stock.request(2)
    assert machine.words.empty()
    machine.available_nbytes = 1 << 40
    stock.retry()
    machine.wait_for_words(2)
    assert stock.failed is None
    assert stock.ready_nbytes == 2 * MIB


def test_a_real_kernel_refusal_becomes_the_reason(machine: Machine) -> None:
    stock = machine.stock(1)
    stock.start()
    stock.segment_nbytes = 4097  # what the segment itself refuses
    stock.request(1)
    machine.wait_for_words(1)
    assert stock.failed is not None
    assert "whole number" in stock.failed


def test_closing_does_not_wait_for_a_large_segment(machine: Machine) -> None:
    stock = machine.stock(1, segment_nbytes=256 * MIB)
    stock.start()
    entered, go_on = threading.Event(), threading.Event()
    num_steps = 0

    def available() -> int:
        nonlocal num_steps
        num_steps += 1
        entered.set()
        assert go_on.wait(TIMEOUT_S)
        return 1 << 40

    stock._available = available
    stock.request(1)
    assert entered.wait(TIMEOUT_S)
    closer = threading.Thread(target=stock.close)
    closer.start()
    with stock._changed:
        assert stock._changed.wait_for(lambda: stock._stopping, TIMEOUT_S)
    go_on.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert num_steps == 1  # of four
    assert stock.ready_nbytes == 0


def test_a_smaller_budget_destroys_what_is_ready_above_it(machine: Machine) -> None:
    stock = machine.stock(4, prefault="background")
    stock.start()
    machine.wait_for_words(3)
    stock.set_budget(2 * MIB)
    assert stock.ready_nbytes == 2 * MIB
    stock.set_budget(3 * MIB)
    machine.wait_for_words(1)
    assert stock.ready_nbytes == 3 * MIB


def test_what_is_being_made_while_the_budget_shrinks_is_not_kept_above_it(machine: Machine) -> None:
    stock = machine.stock(2)
    stock.start()
    stock.request(1)
    machine.wait_for_words(1)

    def available() -> int:
        stock.set_budget(MIB)
        return 1 << 40

    stock._available = available
    with stock.take():  # type: ignore[union-attr]
        stock.request(1)
        machine.wait_for_words(1)
        assert (stock.ready_nbytes, stock.taken_nbytes) == (0, MIB)


def test_a_smaller_budget_destroys_ready_huge_segments_too_after_the_plain_ones(machine: Machine) -> None:
    stock = machine.stock(4, prefault="background")
    stock.start()
    machine.wait_for_words(3)
    shelf = stock._ready
    with stock._changed:  # as a machine with huge pages set aside would have made two of them
        shelf[True].extend((shelf[False].pop(), shelf[False].pop()))
    stock.set_budget(2 * MIB)
    assert (len(shelf[False]), len(shelf[True])) == (0, 2)
    stock.set_budget(MIB)
    assert stock.ready_nbytes == MIB
    stock.set_budget(0)
    assert stock.ready_nbytes == 0


def test_what_was_wanted_when_memory_ran_short_is_not_made_for_nobody_later(machine: Machine) -> None:  # case D1
    stock = machine.stock(8)
    stock.start()
    machine.available_nbytes = 10 * MIB
    stock.request(5)
    machine.wait_for_words(1)
    machine.available_nbytes = 1 << 40
    stock.retry()
    stock.request(1)
    machine.wait_for_words(1)
    stock.close()
    assert machine.words.empty()
    assert stock._wanted == {False: 1, True: 0}


def test_wanted_huge_pages_that_are_not_there_are_plain_ones(machine: Machine) -> None:
    stock = machine.stock(2, segment_nbytes=2 * MIB)
    stock.start()
    assert stock.take(huge_pages=True) is None
    stock.request(1, huge_pages=True)
    machine.wait_for_words(2)  # that there are no huge ones; then a plain one
    with stock.take(huge_pages=True) as segment:  # type: ignore[union-attr]
        assert isinstance(segment, HostSegment)
        assert not segment.huge_pages
    assert stock.failed is None


def test_huge_pages_that_the_kernel_then_refuses_are_plain_ones_too(machine: Machine) -> None:
    stock = machine.stock(2, segment_nbytes=2 * MIB, prefault="background")
    stock.start()
    machine.wait_for_words(1)
    machine.huge_nbytes = 2 * MIB  # claimed, but this machine's kernel need not have them
    stock.request(1, huge_pages=True)
    machine.wait_for_words(1)
    with stock.take(huge_pages=True) as segment:  # type: ignore[union-attr]
        assert isinstance(segment, HostSegment)
    assert stock.failed is None


def test_a_segment_that_cannot_be_prepared_is_given_back(machine: Machine) -> None:
    made: list[HostSegment] = []

    def refuse(segment: HostSegment) -> None:
        made.append(segment)
        raise OSError(12, "Cannot allocate memory")

    stock = machine.stock(2, prepare=refuse)
    stock.start()
    stock.request(1)
    machine.wait_for_words(1)
    assert stock.failed is not None
    assert [segment.closed for segment in made] == [True]
