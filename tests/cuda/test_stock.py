"""Segments made ahead on a card: the budget, the room left to others, shortages, and a card that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvd.cuda import Context, Driver
from kvd.errors import CudaOutOfMemory
from kvd.memory.device_segment import DeviceSegment
from kvd.memory.device_stock import DeviceStock
from tests.fakecuda.machine import MIB, FakeMachine
from tests.support.wait import eventually

Make = Callable[..., DeviceStock]


@pytest.fixture
def make(p40: Context) -> Iterator[Make]:
    made: list[DeviceStock] = []

    def make(**options: object) -> DeviceStock:
        arguments = {"segment_nbytes": 8 * MIB, "budget_nbytes": 32 * MIB, "reserve": 0, **options}
        stock = DeviceStock(p40, **arguments)
        made.append(stock)
        return stock

    yield make
    for stock in made:
        stock.close()


def take_all(stock: DeviceStock) -> list[DeviceSegment]:
    return list(iter(stock.take, None))


def test_the_budget_is_filled_ahead_and_not_exceeded(make: Make, machine: FakeMachine):
    stock = make()
    stock.start()
    eventually(lambda: stock.ready_nbytes == 32 * MIB)
    taken = take_all(stock)
    assert (len(taken), stock.taken_nbytes, stock.ready_nbytes) == (4, 32 * MIB, 0)
    stock.request(1)
    eventually(lambda: stock.available_nbytes() == 32 * MIB)
    assert stock.take() is None
    assert machine.held_nbytes() == 32 * MIB


def test_lazy_makes_what_is_asked_for(make: Make):
    ready = threading.Event()
    stock = make(prefault="lazy", on_ready=ready.set)
    stock.start()
    first = stock.take()
    assert first is not None
    assert stock.take() is None
    stock.request(1)
    assert ready.wait(10)
    assert stock.take() is not None


def test_discarded_memory_comes_back_to_the_card(make: Make, machine: FakeMachine):
    stock = make(prefault="lazy")
    stock.start()
    segment = stock.take()
    assert segment is not None
    stock.discard(segment)
    eventually(lambda: machine.held_nbytes() == 0)
    assert segment.closed


def test_a_segment_is_never_handed_out_twice(make: Make):
    stock = make(budget_nbytes=8 * MIB)
    stock.start()
    first = stock.take()
    assert first is not None
    stock.discard(first)
    eventually(lambda: stock.ready_nbytes == 8 * MIB)
    assert stock.take() is not first


def test_room_is_left_to_others_on_the_card(make: Make, machine: FakeMachine):
    stock = make(budget_nbytes=64 * MIB, reserve=20 * MIB)
    stock.start()
    eventually(lambda: stock.failed)
    assert "leave less than the 20 MiB that are reserved" in str(stock.failed)
    assert stock.ready_nbytes == machine.held_nbytes() == 40 * MIB
    assert stock.available_nbytes() == 4 * MIB


@pytest.mark.parametrize("number", range(2, 9))
def test_out_of_memory_at_every_allocation_keeps_what_there_is(make: Make, machine: FakeMachine, number):
    stock = make(budget_nbytes=64 * MIB)
    machine.fail(f"cuMemAlloc_v2:{number}=2")
    stock.start()
    eventually(lambda: stock.failed)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(stock.failed)
    assert stock.ready_nbytes == (number - 1) * 8 * MIB
    stock.retry()
    eventually(lambda: stock.ready_nbytes == 64 * MIB)
    assert stock.failed is None


def test_a_first_segment_that_does_not_fit_is_tried_in_halves(make: Make, machine: FakeMachine, caplog):
    stock = make(segment_nbytes=128 * MIB, budget_nbytes=512 * MIB)
    stock.start()
    assert stock.segment_nbytes == 64 * MIB
    assert stock.ready_nbytes == 64 * MIB
    assert "a device segment of 128 MiB does not fit" in caplog.text


def test_a_budget_below_a_segment_makes_the_segment_smaller(make: Make):
    stock = make(segment_nbytes=64 * MIB, budget_nbytes=20 * MIB)
    stock.start()
    assert stock.segment_nbytes == 16 * MIB
    assert stock.ready_nbytes == 16 * MIB


def test_no_memory_at_all_ends_the_start(make: Make, machine: FakeMachine):
    stock = make()
    machine.fail("cuMemAlloc_v2:*=2")
    with pytest.raises(CudaOutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        stock.start()
    stock.close()
    assert machine.held_nbytes() == 0


def test_a_context_that_was_released_gives_all_back_and_can_be_had_again(driver: Driver, machine: FakeMachine):
    for _ in range(2):
        with driver.open(driver.devices[0]) as context:
            stock = DeviceStock(context, segment_nbytes=8 * MIB, budget_nbytes=16 * MIB, reserve=0)
            stock.start()
            eventually(partial(lambda stock: stock.ready_nbytes == 16 * MIB, stock))
            stock.close()
        assert machine.held_nbytes() == 0
        assert machine.end_of_process() == 0


def test_somebody_elses_memory_counts(make: Make, driver: Driver, machine: FakeMachine):
    with driver.open(driver.devices[0]) as other, DeviceSegment(other, 40 * MIB):
        stock = make(budget_nbytes=64 * MIB)
        stock.start()
        eventually(lambda: stock.failed)
        assert stock.ready_nbytes == 24 * MIB


def test_a_smaller_budget_gives_ready_memory_back_at_once(make: Make, machine: FakeMachine):
    stock = make()
    stock.start()
    eventually(lambda: stock.ready_nbytes == 32 * MIB)
    held = stock.take()
    stock.set_budget(16 * MIB)
    eventually(lambda: machine.held_nbytes() == 16 * MIB)
    assert held is not None
    stock.discard(held)
    eventually(lambda: stock.ready_nbytes == 16 * MIB and machine.held_nbytes() == 16 * MIB)


def test_a_card_that_is_gone_is_told_and_the_stock_lives(make: Make, machine: FakeMachine):
    told = threading.Event()
    stock = make(prefault="lazy", on_ready=told.set)
    stock.start()
    segment = stock.take()
    machine.lose_card(0)
    stock.request(1)
    assert told.wait(10)
    assert "LAUNCH_FAILED" in str(stock.lost)
    assert "LAUNCH_FAILED" in str(stock.failed)
    told.clear()
    stock.retry()
    stock.request(1)
    assert told.wait(10)
    assert stock.failed
    assert segment is not None
    stock.discard(segment)
    stock.close()
    assert segment.closed


def test_a_card_that_goes_while_nothing_is_made_is_noticed_when_figures_are_asked_for(make: Make, machine: FakeMachine):
    told = threading.Event()
    stock = make(prefault="lazy", on_ready=told.set)
    stock.start()
    machine.lose_card(0)
    stock.available_nbytes()
    assert told.wait(10)
    assert stock.lost
