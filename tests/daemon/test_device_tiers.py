"""Blocks of a card go down to the tiers and come up again with the same bytes, though copies run by themselves.

Asynchronous work on the fake card is done only when somebody waits for it, so whatever is not waited for is wrong here.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from kvd.protocol.requests import Pin, Seal, Spill, Verify
from kvd.protocol.wire import unpack_block_ids
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import running_daemon
from tests.support.device_client import DeviceClient, content
from tests.support.raw_client import hashes
from tests.support.wait import eventually

HOST_TIER = {"host": {"budget": 16 << 20}, "redis": {"url": ""}}


def copied_down(client: DeviceClient) -> bool:
    return client.ask(Spill).num_left == 0


def words(prefix: str, num_blocks: int) -> list[str]:
    return [f"{prefix} {number}" for number in range(num_blocks)]


def release(client: DeviceClient, blocks: list[int]) -> None:
    client.release(1, blocks)


@pytest.mark.parametrize("delay_ms", [-1, 0])
def test_what_fell_out_of_the_card_comes_back_as_it_was(tmp_path: Path, machine: FakeMachine, delay_ms: int) -> None:
    environ = {"KVD_FAKECUDA_DELAY_MS": str(delay_ms)}
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB", tiers=HOST_TIER, environ=environ) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        client.open_on()
        first, second = words("first", 400), words("second", 400)
        for wanted in (first, second):
            client.release(1, client.publish(1, *wanted))
            eventually(lambda: copied_down(client))
        begun = client.begin(1, hashes(*first), num_blocks=400)
        assert begun.num_cached == 400
        blocks = unpack_block_ids(begun.blocks)
        assert [client.read_block(block) for block in blocks] == [content(word) for word in first]
        mover = client.status().mover
        assert mover is not None
        assert mover.counters["promoted"] >= 288, "the rest was still there"
        assert mover.counters["spilled"] == 800
        client.check()


def test_a_block_that_is_not_what_its_writer_sealed_is_not_copied_down(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB", tiers=HOST_TIER, memory={"checksums": True}) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        client.open_on()
        begun = client.begin(1, num_blocks=2)
        blocks = unpack_block_ids(begun.blocks)
        for block, word in zip(blocks, ["good", "bad"], strict=True):
            client.write_block(block, content(word))
        checksums = [xxhash.xxh3_64_intdigest(content(word)) for word in ("good", "bad")]
        client.ask(Seal, 1, begun.blocks, hashes("good", "bad"), struct.pack("<2Q", *checksums))
        client.write_block(blocks[1], content("a stray write"))
        client.release(1, list(blocks))
        eventually(lambda: copied_down(client))
        assert client.begin(1, hashes("good"), num_blocks=1).num_cached == 1
        assert client.begin(1, hashes("bad"), num_blocks=1).num_cached == 0
        assert client.status().mover.counters["spilled"] == 1  # type: ignore[union-attr]


def test_a_flush_while_a_block_is_copied_leaves_nothing(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(
            tmp_path, machine=machine, budget="2MiB", tiers={**HOST_TIER, "spill": "write_through"}
        ) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        client.open_on()
        blocks = client.publish(1, *words("old", 100))
        assert client.flush().num_namespaces == 1
        client.release(1, blocks)
        assert client.begin(1, hashes(*words("old", 100)), num_blocks=100).num_cached == 0
        client.check()


def test_blocks_on_a_card_are_compared_with_their_checksums(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB", memory={"checksums": True}) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        client.open_on()
        begun = client.begin(1, num_blocks=3)
        blocks = unpack_block_ids(begun.blocks)
        for block, word in zip(blocks, ["good", "bad", "unchecked"], strict=True):
            client.write_block(block, content(word))
        checksums = [xxhash.xxh3_64_intdigest(content(word)) for word in ("good", "bad")]
        client.ask(Seal, 1, begun.blocks, hashes("good", "bad", "unchecked"), struct.pack("<3Q", *checksums, 0))
        client.write_block(blocks[1], content("a stray write"))
        verified = client.ask(Verify)
        assert (verified.cursor, verified.num_verified, verified.num_unchecked) == (0, 2, 1)
        assert verified.corrupt == [hashes("bad").hex()]
        assert client.begin(1, hashes("bad"), num_blocks=1, announce=False).num_cached == 0
        client.check()


def test_a_pin_keeps_blocks_on_the_card_for_staged_clients_too(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(
            tmp_path,
            machine=machine,
            budget="2MiB",
            memory={"idle_release_s": 0.01},
            limits={"pinned": 1.0},
        ) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        with DeviceClient(daemon.folder) as staged:
            cache = staged.open_on(staged=True)
            staged.publish(cache, *words("kept", 10))
            assert staged.ask(Pin, cache, hashes(*words("kept", 10))).num_blocks == 10
            eventually(lambda: client.status().pins[0].num_tokens_resident == 160)
        # Nobody has a cache on the card, but what is pinned there stays.
        assert client.status().memory.state == "serving"
        client.open_on()
        client.release(1, client.publish(1, *words("other", 502)))
        begun = client.begin(1, hashes(*words("kept", 10)), num_blocks=10)
        assert begun.num_cached == 10
        assert [client.read_block(one) for one in unpack_block_ids(begun.blocks)] == [
            content(word) for word in words("kept", 10)
        ]
