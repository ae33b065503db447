"""A daemon whose pools live on a card: who is granted what, and when the card's memory is free again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvd.cuda import pid_namespace
from kvd.layout import KVLayout
from kvd.protocol.replies import Reserved
from kvd.protocol.requests import OpenCache, Reserve
from kvd.protocol.session import DeviceSegmentGranted, SegmentGranted
from kvd.protocol.wire import unpack_block_ids
from tests.fakecuda.machine import MIB, P40, RTX_3050, FakeMachine
from tests.support.daemon import Daemon, running_daemon
from tests.support.device_client import DeviceClient, content
from tests.support.processes import client_process
from tests.support.raw_client import LAYOUT, hashes
from tests.support.wait import eventually

SEGMENT = 2 * MIB
LARGE = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, block_tokens=16)
"""Another block size, so another pool."""
DEVICE = "tests.support.device_client"
BLOCKS_PER_SEGMENT = SEGMENT // LAYOUT.block_nbytes


def test_two_processes_share_blocks_on_a_card(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB") as daemon,
        DeviceClient(daemon.folder) as writer,
        DeviceClient(daemon.folder) as reader,
    ):
        cache = writer.open_on()
        assert writer.opened.device == P40.uuid
        assert writer.opened.pid_namespace == pid_namespace()
        assert (writer.opened.segment_nbytes, writer.opened.staged_from) == (SEGMENT, "")
        blocks = writer.publish(cache, "a", "b")
        (grant,) = writer.grants().values()
        assert grant == DeviceSegmentGranted(
            pool=writer.opened.pool,
            segment=0,
            nbytes=SEGMENT,
            device=P40.uuid,
            handle=grant.handle,
            pid_namespace=pid_namespace(),
            pid=daemon.pid,
            epoch=writer.epoch,
        )
        assert len(grant.handle) == 64
        assert not writer.descriptors[1:], "no descriptor comes with a handle"

        assert reader.open_on() == 1
        begun = reader.begin(1, hashes("a", "b"), num_blocks=3)
        assert begun.num_cached == 2
        assert [reader.read_block(block) for block in blocks] == [content("a"), content("b")]
        assert len(reader.grants()) == 1, "a segment is granted once, whatever is done with its blocks"
        reader.check()
        (memory, host) = reader.status().memories
        assert (memory.device, memory.name, memory.compute_capability) == (P40.uuid, P40.name, "6.1")
        assert (memory.used_nbytes, memory.budget_nbytes) == (SEGMENT, 8 * MIB)
        assert (memory.total_nbytes, memory.state) == (64 * MIB, "serving")
        assert host.device == "host"
        assert [(one.mode, one.device, one.num_segments) for one in reader.status().clients[0].maps] == [
            ("mapped", P40.uuid, 1)
        ]


@pytest.mark.parametrize("end", ["it confirms", "its session ends", "it is killed"])
def test_memory_goes_to_another_pool_only_when_nobody_maps_it(tmp_path: Path, machine: FakeMachine, end: str) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon,
        DeviceClient(daemon.folder) as client,
        DeviceClient(daemon.folder) as other,
        contextlib.ExitStack() as stack,
    ):
        client.open_on()
        blocks = client.leave(2 * BLOCKS_PER_SEGMENT)
        if end == "it is killed":
            killed = stack.enter_context(client_process(daemon.folder, module=DEVICE, leave=2 * BLOCKS_PER_SEGMENT))
        cache = other.open_on(layout=LARGE)
        waiting = other.post(Reserve, cache, 1)
        eventually(client.revoked)
        (revoked,) = client.revoked()
        inside = blocks[revoked.segment * BLOCKS_PER_SEGMENT]
        assert client.read_block(inside) == content(f"word {revoked.segment * BLOCKS_PER_SEGMENT}")
        status = client.status()
        assert status.memory.draining_nbytes == SEGMENT
        assert [one.num_to_close for one in status.clients[0].maps] == [1]
        assert not other.dealer.poll(0), "nobody has closed it"
        if end == "its session ends":
            client.close()
        else:
            assert client.confirm_closes() == 1
        if end == "it is killed":
            killed.kill()
        reserved = other.receive()
        assert isinstance(reserved, Reserved), reserved
        assert reserved.request_id == waiting
        (block,) = unpack_block_ids(reserved.blocks)
        assert other.read_block(block) == bytes(LARGE.block_nbytes), "what another pool left there is gone"
        eventually(lambda: machine.held_nbytes() == 2 * SEGMENT)
        assert other.status().memory.draining_nbytes == 0
        other.check()


def test_a_client_that_closes_nothing_costs_others_a_bounded_wait(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB") as daemon,
        DeviceClient(daemon.folder) as client,
        DeviceClient(daemon.folder) as other,
    ):
        client.open_on()
        client.leave(3)
        cache = other.open_on(layout=LARGE)
        first = other.post(Reserve, cache, 1)
        eventually(client.revoked)
        # The next one knows that memory is on its way, and gets its error when it does not come.
        failed = other.ask(Reserve, cache, 1)
        assert failed.code == "out-of-blocks"
        client.confirm_closes()
        reserved = other.receive()
        assert (type(reserved), reserved.request_id) == (Reserved, first)


def test_a_cache_on_host_memory_beside_the_card(tmp_path: Path, machine: FakeMachine) -> None:
    with running_daemon(tmp_path, machine=machine, budget="8MiB") as daemon, DeviceClient(daemon.folder) as client:
        cache = client.open_on("host")
        assert (client.opened.device, client.opened.pid_namespace) == ("host", "")
        client.reserve(cache, 1)
        assert any(isinstance(message, SegmentGranted) for message in client.drain())
        on_card = client.open_on(P40.uuid)
        assert on_card != cache
        assert client.opened.device == P40.uuid
        failed = client.ask(OpenCache, **client.opening(device=RTX_3050.uuid))
        assert failed.code == "cuda-unavailable"
        assert P40.uuid in failed.message


def test_the_choice_of_the_card_is_in_the_log(tmp_path: Path, machine: FakeMachine) -> None:
    with running_daemon(tmp_path, machine=machine, budget="8MiB", memory={"device": "auto"}) as daemon:
        assert "most memory that drives no display" in daemon.log()
        assert "RTX 3050 (it drives a display)" in daemon.log()


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_without_a_driver(tmp_path: Path, device: str) -> None:
    missing = {"KVD_LIBCUDA": str(tmp_path / "nothing.so")}
    if device == "auto":
        with running_daemon(tmp_path, environ=missing, memory={"device": "auto"}) as daemon:
            lines = [line for line in daemon.log().splitlines() if "blocks live in" in line]
            assert len(lines) == 1
            assert "host memory: no NVIDIA driver here" in lines[0]
        return
    daemon = Daemon(tmp_path / "run", environ=missing, memory={"device": device, "budget": 8 * MIB})
    process = daemon.spawn()
    assert process.wait(30) == 11
    lines = daemon.log().splitlines()
    assert len(lines) == 1
    assert 'device "cuda:0" was asked for, but no NVIDIA driver here' in lines[0]


@pytest.mark.parametrize("visible", ["1", RTX_3050.uuid])
def test_a_card_is_named_as_the_daemon_sees_it(tmp_path: Path, machine: FakeMachine, visible: str) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="4MiB", environ={"CUDA_VISIBLE_DEVICES": visible}) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        client.open_on()
        assert client.opened.device == RTX_3050.uuid
        blocks = client.publish(1, "a")
        assert client.read_block(blocks[0]) == content("a")


def test_a_stopped_daemon_leaves_nothing_on_the_card(tmp_path: Path, machine: FakeMachine) -> None:
    with running_daemon(tmp_path, machine=machine, budget="8MiB", prefault="background") as daemon:
        eventually(lambda: machine.held_nbytes() == 8 * MIB)
        with DeviceClient(daemon.folder) as client:
            client.open_on()
            client.publish(1, "a")
    assert machine.held_nbytes() == 0


def test_a_pool_rule_names_a_second_card(tmp_path: Path, machine: FakeMachine) -> None:
    rules = [
        {"name": "small", "models": ["small*"], "device": "cuda:1", "budget": 4 * MIB},
        {"name": "host", "models": ["host*"], "device": "cpu"},
        {"name": "same", "models": ["same*"], "device": P40.uuid.replace("GPU-", "cuda:GPU-")[:20]},
    ]
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB", pools=rules) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        devices = {}
        for model in ("small", "host", "same", "other"):
            cache = client.open_on(model=model)
            devices[model] = client.opened.device
            block = client.reserve(cache, 1)
            client.write_block(int.from_bytes(block, "little"), content(model))
            assert client.read_block(int.from_bytes(block, "little")) == content(model)
        assert devices == {"small": RTX_3050.uuid, "host": "host", "same": P40.uuid, "other": P40.uuid}
        assert [(one.device, one.budget_nbytes) for one in client.status().memories[:2]] == [
            (P40.uuid, 8 * MIB),
            (RTX_3050.uuid, 4 * MIB),
        ]
        assert machine.held_nbytes(1) == SEGMENT
        client.check()
    assert machine.held_nbytes(1) == 0
