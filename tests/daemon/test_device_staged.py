"""Processes that cannot map the card use a host pool beside it, which the daemon fills from there and copies back."""

from __future__ import annotations

from pathlib import Path

from kvd.protocol.requests import Begin, Match
from kvd.protocol.wire import unpack_block_ids
from tests.daemon.test_device_tiers import HOST_TIER, copied_down, words
from tests.fakecuda.machine import P40, FakeMachine
from tests.support.daemon import running_daemon
from tests.support.device_client import DeviceClient, content
from tests.support.raw_client import hashes
from tests.support.wait import eventually


def counter(client: DeviceClient, name: str) -> int:
    status = client.status()
    assert status.mover is not None
    return {**status.counters, **status.mover.counters}[name]


def test_what_the_card_has_is_found_in_host_memory(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon,
        DeviceClient(daemon.folder) as on_card,
        DeviceClient(daemon.folder) as staged,
    ):
        on_card.open_on()
        on_card.publish(1, *words("w", 100))
        cache = staged.open_on(staged=True)
        assert (staged.opened.device, staged.opened.staged_from) == ("host", P40.uuid)
        assert staged.ask(Match, cache, hashes(*words("w", 101))).num_resident == 100
        begun = staged.begin(cache, hashes(*words("w", 101)), num_blocks=101, wait_s=10.0)
        assert begun.num_cached == 100
        blocks = unpack_block_ids(begun.blocks)[:100]
        assert [staged.read_block(block) for block in blocks] == [content(word) for word in words("w", 100)]
        assert counter(staged, "carried") == 100
        assert [one.mode for one in staged.status().clients[1].maps] == ["staged"]
        staged.check()


def test_what_a_staged_client_computes_goes_back_to_the_card(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon,
        DeviceClient(daemon.folder) as on_card,
        DeviceClient(daemon.folder) as staged,
    ):
        cache = staged.open_on(staged=True)
        staged.publish(cache, *words("w", 100))
        eventually(lambda: counter(staged, "written_back") == 100)
        on_card.open_on()
        begun = on_card.begin(1, hashes(*words("w", 100)), num_blocks=100)
        assert begun.num_cached == 100
        blocks = unpack_block_ids(begun.blocks)
        assert [on_card.read_block(block) for block in blocks] == [content(word) for word in words("w", 100)]
        on_card.check()


def test_several_who_wait_get_one_copy(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon,
        DeviceClient(daemon.folder) as on_card,
        DeviceClient(daemon.folder) as one,
        DeviceClient(daemon.folder) as two,
    ):
        on_card.open_on()
        on_card.publish(1, *words("w", 60))
        for client in (one, two):
            client.open_on(staged=True)
        wanted = hashes(*words("w", 60))
        for client in (one, two, one):
            client.post(Begin, 1, wanted, 60, 60, wait_s=10.0)
        for client in (one, two, one):
            reply = client.receive()
            assert reply.num_cached == 60  # type: ignore[union-attr]
        assert counter(one, "carried") == 60
        one.check()


def test_a_prefix_on_the_card_goes_on_in_the_tiers_below(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB", tiers=HOST_TIER) as daemon,
        DeviceClient(daemon.folder) as on_card,
        DeviceClient(daemon.folder) as staged,
    ):
        on_card.open_on()
        on_card.release(1, on_card.publish(1, *words("w", 400)))
        eventually(lambda: copied_down(on_card))
        # The tail of a sequence is evicted first: what is left on the card is a prefix.
        on_card.publish(1, *words("other", 300))
        cache = staged.open_on(staged=True)
        begun = staged.begin(cache, hashes(*words("w", 400)), num_blocks=400, wait_s=10.0)
        assert begun.num_cached == 400
        blocks = unpack_block_ids(begun.blocks)
        assert [staged.read_block(block) for block in blocks] == [content(word) for word in words("w", 400)]
        assert counter(staged, "carried") == 212
        assert counter(staged, "promoted") == 188
        staged.check()


def test_a_flush_is_final_for_both(tmp_path: Path, machine: FakeMachine) -> None:  # case A9
    with (
        running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon,
        DeviceClient(daemon.folder) as on_card,
        DeviceClient(daemon.folder) as staged,
    ):
        on_card.open_on()
        on_card.publish(1, *words("w", 50))
        staged.open_on(staged=True)
        staged.begin(1, hashes(*words("w", 50)), num_blocks=50, wait_s=10.0)
        staged.publish(1, *words("mine", 50))
        staged.flush()
        for client in (on_card, staged):
            for prefix in ("w", "mine"):
                begun = client.begin(1, hashes(*words(prefix, 50)), num_blocks=50, announce=False, wait_s=0.0)
                assert begun.num_cached == 0
        staged.check()


def test_no_room_on_the_card_leaves_blocks_in_host_memory(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB", tiers=HOST_TIER) as daemon,
        DeviceClient(daemon.folder) as on_card,
        DeviceClient(daemon.folder) as staged,
    ):
        on_card.open_on()
        on_card.publish(1, *words("held", 512))
        staged.open_on(staged=True)
        blocks = staged.publish(1, *words("w", 40))
        eventually(lambda: counter(staged, "not_written_back") == 40)
        assert [staged.read_block(block) for block in blocks] == [content(word) for word in words("w", 40)]
        staged.release(1, blocks)
        eventually(lambda: copied_down(staged))
        staged.check()
