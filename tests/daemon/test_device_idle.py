"""A card that nobody uses is given back with everything on it, and comes back when somebody wants it."""

from __future__ import annotations

from pathlib import Path

from kvd.protocol.requests import OpenCache
from kvd.protocol.wire import unpack_block_ids
from tests.daemon.test_device_tiers import HOST_TIER, words
from tests.fakecuda.machine import MIB, P40, FakeMachine
from tests.support.daemon import running_daemon
from tests.support.device_client import DeviceClient, content
from tests.support.raw_client import RawClient, hashes
from tests.support.wait import eventually

IDLE = {"idle_release_s": 0.05}


def state(client: RawClient) -> str:
    return client.status().memory.state


def test_what_was_on_the_card_is_found_when_it_is_back(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB", memory=IDLE, tiers=HOST_TIER) as daemon,
        RawClient(daemon.folder) as watcher,
    ):
        for number in range(2):
            with DeviceClient(daemon.folder) as client:
                client.open_on()
                assert client.opened.device == P40.uuid
                assert state(watcher) == "serving"
                begun = client.begin(1, hashes(*words("w", 700)), num_blocks=700, wait_s=10.0, announce=False)
                blocks = unpack_block_ids(begun.blocks)
                if number:
                    assert begun.num_cached == 700
                    assert [client.read_block(block) for block in blocks] == [content(word) for word in words("w", 700)]
                else:
                    client.publish(1, *words("w", 700))
            # A session without a cache there, such as one that asks for the status, keeps no card awake.
            eventually(lambda: state(watcher) == "released")
            eventually(lambda: machine.held_nbytes() == 0)
        assert watcher.status().memory.used_nbytes == 0
        watcher.check()
    assert "is released" in daemon.log()
    assert "lost" not in daemon.log()


def test_a_staged_client_keeps_the_card(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB", memory=IDLE) as daemon,
        DeviceClient(daemon.folder) as on_card,
        RawClient(daemon.folder) as watcher,
    ):
        eventually(lambda: state(watcher) == "released")
        with DeviceClient(daemon.folder) as staged:
            staged.open_on(staged=True)
            staged.publish(1, *words("w", 20))
            eventually(lambda: watcher.counter("written_back") == 20)
            assert state(watcher) == "serving"
            on_card.open_on()
            assert on_card.begin(1, hashes(*words("w", 20)), num_blocks=20).num_cached == 20


def test_a_card_that_does_not_come_back_is_an_error_and_tried_again(tmp_path: Path, machine: FakeMachine) -> None:
    # The first context is made by the start, the second by the first client.
    fails = {"KVD_FAKECUDA_FAIL": "cuDevicePrimaryCtxRetain:2=999"}
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB", memory=IDLE, environ=fails) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        eventually(lambda: state(client) == "released")
        failed = client.ask(OpenCache, **client.opening())
        assert failed.code == "cuda-error"
        assert "cuDevicePrimaryCtxRetain" in failed.message
        client.open_on()
        assert client.opened.device == P40.uuid
        client.reserve(1, 1)
        assert machine.held_nbytes() == 2 * MIB


def test_a_session_that_ends_while_it_waits_is_forgotten(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB", memory=IDLE) as daemon,
        RawClient(daemon.folder) as watcher,
    ):
        for _ in range(5):
            eventually(lambda: state(watcher) == "released")
            with DeviceClient(daemon.folder) as client:
                for _ in range(10):
                    client.post(OpenCache, **client.opening())
        eventually(lambda: state(watcher) == "released")
        watcher.check()
