"""A client on a card whose session is over while its process is not: the driver may still work for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.protocol.replies import Failed, Reserved
from kvd.protocol.requests import Reserve
from tests.daemon.test_device_pools import BLOCKS_PER_SEGMENT, DEVICE, LARGE, SEGMENT
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import running_daemon
from tests.support.device_client import DeviceClient, words
from tests.support.processes import client_process
from tests.support.raw_client import RawClient, hashes, totals
from tests.support.wait import eventually


def test_what_a_dying_process_may_still_write_is_given_to_nobody(  # case B2
    tmp_path: Path, machine: FakeMachine
) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB") as daemon,
        DeviceClient(daemon.folder) as other,
        client_process(daemon.folder, module=DEVICE, publish=5, reserve=500) as dying,
    ):
        cache = other.open_on()
        # A killed process's socket may close first, and its context on the card last.
        dying.tell({"hang_up": 0})
        eventually(lambda: len(other.status().clients) == 1)
        assert totals(other.status()) == (0, 500), "what it only read is free"
        assert other.begin(cache, hashes(*words(5)), num_blocks=5).num_cached == 5
        refused = other.ask(Reserve, cache, 100)
        assert isinstance(refused, Failed)
        assert refused.code == "out-of-blocks"
        other.check()
        dying.kill()
        eventually(lambda: totals(other.status()) == (5, 0), timeout_s=1.0)
        assert isinstance(other.ask(Reserve, cache, 100), Reserved)
        other.check()


@pytest.mark.parametrize("end", ["hang_up", "misbehave"])
def test_memory_that_an_ended_session_may_map_waits_for_its_process(
    tmp_path: Path, machine: FakeMachine, end: str
) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB") as daemon,
        DeviceClient(daemon.folder) as other,
        RawClient(daemon.folder) as watcher,
        client_process(daemon.folder, module=DEVICE, leave=3) as lingering,
    ):
        lingering.tell({end: 0})
        eventually(lambda: len(watcher.status().clients) == 2)
        cache = other.open_on(layout=LARGE)
        waiting = other.post(Reserve, cache, 1)
        eventually(lambda: watcher.status().memory.draining_nbytes == SEGMENT)
        assert not other.dealer.poll(0), "the process may map it"
        lingering.kill()
        reserved = other.receive()
        assert (type(reserved), reserved.request_id) == (Reserved, waiting)
        assert watcher.status().memory.draining_nbytes == 0
        other.check()


def test_who_says_farewell_is_waited_for_by_nobody(tmp_path: Path, machine: FakeMachine) -> None:
    with running_daemon(tmp_path, machine=machine, budget="2MiB") as daemon, DeviceClient(daemon.folder) as other:
        with DeviceClient(daemon.folder) as client:
            client.open_on()
            client.reserve(1, BLOCKS_PER_SEGMENT)
        eventually(lambda: totals(other.status()) == (0, 0))
        cache = other.open_on(layout=LARGE)
        assert isinstance(other.ask(Reserve, cache, 1), Reserved)
        other.check()
