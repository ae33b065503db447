"""Sessions on a card whose process may still run when they end."""

from __future__ import annotations

from kvd.cuda import Driver
from kvd.memory import CardMemory
from kvd.protocol.replies import Reserved
from kvd.protocol.wire import unpack_block_ids
from kvd.service.settings import ServiceSettings
from tests.cuda.conftest import machine
from tests.fakecuda.machine import MIB, FakeMachine
from tests.service.harness import error_code, expect
from tests.service.test_staged import StagedHouse, house

__all__ = ["house", "machine"]
PER_SEGMENT = 512


def test_who_wants_what_a_killed_process_may_still_write_waits_a_moment(house: StagedHouse) -> None:
    writer, other, late = house.on_card(), house.on_card(), house.on_card()
    expect(Reserved, writer.reserve(PER_SEGMENT))
    assert house.service.end_session(writer.session, may_linger=True)
    assert other.reserve(1) is None
    house.service.process_ended(writer.session)
    house.deliver()
    expect(Reserved, other.answer())
    house.check()
    # One that goes on living is not waited for by each of the others for long.
    expect(Reserved, other.reserve(PER_SEGMENT - 1))
    assert house.service.end_session(other.session, may_linger=True)
    assert late.reserve(1) is None
    house.pass_time(ServiceSettings().drain_wait_s)
    assert error_code(late.answer()) == "out-of-blocks"
    assert house.service.end_lingering(other.session)
    assert not house.service.end_lingering(other.session)
    expect(Reserved, late.reserve(1))
    house.service.process_ended(other.session)
    house.check()


def test_a_session_that_was_granted_nothing_on_a_card_does_not_linger(house: StagedHouse) -> None:
    idle, staged = house.on_card(), house.staged()
    expect(Reserved, staged.reserve(1))
    assert not house.service.end_session(idle.session, may_linger=True)
    assert not house.service.end_session(staged.session, may_linger=True)
    house.check()


def test_a_card_is_not_released_under_a_process_that_may_map_it(machine: FakeMachine) -> None:
    driver = Driver()
    memory = CardMemory(driver, driver.devices[0], decide=lambda _free, _total: (2 * MIB, 2 * MIB), prefault="lazy")
    memory.open()
    house = StagedHouse(memory, idle_release_s=60.0)
    reader = house.on_card()
    reader.release(reserved=unpack_block_ids(expect(Reserved, reader.reserve(1)).blocks))
    assert house.service.end_session(reader.session, may_linger=True)
    house.pass_time(600)
    assert memory.is_open
    house.service.process_ended(reader.session)
    house.pass_time(60)
    assert not memory.is_open
    house.close()
    memory.close()
    assert machine.held_nbytes() == 0
