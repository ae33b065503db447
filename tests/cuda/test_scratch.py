"""What a client's copies to a card go through: page-locked once, or plain memory where the driver refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvd.cuda import address_of
from kvd_client.memory import block_copies, scratch
from kvd_client.memory.scratch import SCRATCH_NBYTES, CardScratch, scratch_of
from tests.fakecuda.machine import P40, RTX_3050, FakeMachine


def num_locked(machine: FakeMachine) -> tuple[int, int]:
    """How often memory was page-locked, and unlocked."""
    return machine.num_calls("cuMemHostRegister_v2"), machine.num_calls("cuMemHostUnregister")


def test_it_is_page_locked_once_and_unlocked_when_it_is_let_go(machine: FakeMachine) -> None:
    card = CardScratch(RTX_3050.uuid)
    machine.forget_calls()
    addresses = []
    for nbytes in (100, 4096, SCRATCH_NBYTES):
        with card.lent(nbytes) as memory:
            assert len(memory) == nbytes
            memory[-1] = 7
            addresses.append(address_of(memory))
        del memory
    assert len(set(addresses)) == 1
    assert num_locked(machine) == (1, 0)
    with card.lent(SCRATCH_NBYTES + 1) as memory:
        assert len(memory) == SCRATCH_NBYTES + 1
    assert num_locked(machine) == (2, 1), "a block larger than that has it made anew"
    card.close()
    card.close()
    assert num_locked(machine) == (2, 2)
    assert machine.num_calls("cuDevicePrimaryCtxRelease_v2") + machine.num_calls("cuDevicePrimaryCtxRelease") == 1


def test_a_driver_that_refuses_is_told_once_and_copies_go_on(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    card = CardScratch(P40.uuid)
    machine.fail("cuMemHostRegister_v2:*=801")
    machine.forget_calls()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with card.lent(4096) as memory:
                memory[:] = bytes(4096)
    (said,) = caplog.messages
    assert said.startswith(f"kvd: copies to {P40.uuid} are not page-locked and take longer: cuMemHostRegister_v2")
    assert num_locked(machine) == (1, 0)
    card.close()


def test_a_card_that_is_not_seen_costs_no_copy(machine: FakeMachine, caplog: pytest.LogCaptureFixture) -> None:
    card = CardScratch("GPU-00000000-0000-0000-0000-000000000000")
    with caplog.at_level(logging.WARNING), card.lent(10) as memory:
        assert len(memory) == 10
    assert "does not see GPU-00000000" in caplog.text


def test_copies_to_a_card_use_its_own_and_those_in_host_memory_none(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch numbers the cards; here its second is the RTX 3050."""
    monkeypatch.setattr(block_copies, "card_of", [P40.uuid, RTX_3050.uuid].__getitem__)
    scratch_of.cache_clear()
    machine.forget_calls()
    with block_copies._scratch_beside(SimpleNamespace(is_cuda=False), 4096) as memory:
        assert len(memory) == 4096
    assert num_locked(machine) == (0, 0)
    for _ in range(2):
        with block_copies._scratch_beside(SimpleNamespace(is_cuda=True, get_device=lambda: 1), 4096) as memory:
            assert len(memory) == 4096
    assert num_locked(machine) == (1, 0)
    scratch.scratch_of(RTX_3050.uuid).close()
    assert num_locked(machine) == (1, 1)
    scratch_of.cache_clear()
