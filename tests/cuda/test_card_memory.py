"""All that a daemon has on one card, as it goes and comes back."""

from __future__ import annotations

import pytest

from kvd.cuda import Context, Driver
from kvd.memory import CardMemory, card_memory
from kvd.memory.segment_locks import SegmentLocks
from tests.fakecuda.machine import MIB
from tests.support.wait import eventually


def test_a_budget_that_is_set_while_the_card_comes_back_holds(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CardMemory(driver, driver.devices[0], decide=lambda _free, _total: (2 * MIB, 2 * MIB))
    memory.open()
    memory.release()
    eventually(lambda: not memory.is_changing)

    def set_at_the_last_moment(context: Context) -> SegmentLocks:
        memory.set_budget(8 * MIB)
        return SegmentLocks(context)

    monkeypatch.setattr(card_memory, "SegmentLocks", set_at_the_last_moment)
    memory.restore()
    try:
        eventually(lambda: memory.ready_nbytes == 8 * MIB)
    finally:
        memory.close()
