"""Whatever the driver or the card does, the daemon lives or ends with one clear line, and nobody gets wrong bytes."""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import BY_CODE
from kvd.protocol.replies import Begun, CacheOpened, Failed, Reserved, Sealed
from kvd.protocol.requests import Begin, OpenCache, Release, Reserve, Seal, Spill
from kvd.protocol.session import Welcome
from kvd.protocol.wire import pack_block_ids, unpack_block_ids
from tests.daemon.test_device_pools import DEVICE, LARGE
from tests.daemon.test_device_tiers import HOST_TIER, words
from tests.fakecuda.machine import MIB, P40, FakeMachine
from tests.support.daemon import Daemon, running_daemon
from tests.support.device_client import DeviceClient, content
from tests.support.processes import client_process
from tests.support.raw_client import hashes
from tests.support.wait import eventually

SEGMENT = 2 * MIB
UNKNOWN, OUT_OF_MEMORY, LOST = 999, 2, 719
TYPED = {code for code in BY_CODE if code.startswith("cuda-")} | {"out-of-blocks", "out-of-memory"}


def ask(client: DeviceClient, kind: type[Any], *fields: object, **named: object) -> Any:
    """The reply, or None for an error that the card is the reason of."""
    reply = client.ask(kind, *fields, **named)
    if isinstance(reply, Failed):
        assert reply.code in TYPED, reply
        return None
    return reply


def open_cache(client: DeviceClient, **named: Any) -> CacheOpened | None:
    opened: CacheOpened | None = ask(client, OpenCache, **client.opening(**named))
    if opened is not None:
        client.take_opened(opened)
    return opened


def compute(client: DeviceClient, cache: int, prompt: list[str]) -> int:
    """Publishes a prompt; how much of it was there, byte for byte right. Whatever fails, fails with a typed error."""
    begun: Begun | None = ask(client, Begin, cache, hashes(*prompt), len(prompt), len(prompt), wait_s=5.0)
    if begun is None:
        return 0
    blocks = list(unpack_block_ids(begun.blocks))
    cached = blocks[: begun.num_cached]
    assert [client.read_block(block) for block in cached] == [content(word) for word in prompt[: len(cached)]]
    missing, written = prompt[begun.num_cached :], blocks[begun.num_cached :]
    for block, word in zip(written, missing, strict=True):
        client.write_block(block, content(word))
    blocks = cached
    if missing:
        sealed: Sealed | None = ask(client, Seal, cache, begun.blocks[4 * begun.num_cached :], hashes(*missing))
        standing = [] if sealed is None else list(unpack_block_ids(sealed.blocks))
        # Where a later part of the prompt was still there, that block stands, and ours goes back.
        spare = [own for own, other in zip_longest(written, standing) if own != other]
        client.ask(Release, cache, reserved=pack_block_ids(spare), ack=True)
        blocks = [*cached, *standing]
    client.release(cache, blocks)
    return begun.num_cached


def takes_over(client: DeviceClient, cache: int) -> bool:
    """Whether the pool gets a segment of another one, which has to wait until this very client has closed that."""
    client.post(Reserve, cache, 1)
    while not client.dealer.poll(50):
        client.confirm_closes()
    reply = client.receive()
    if isinstance(reply, Failed) and reply.code not in TYPED:
        pytest.fail(str(reply))
    return isinstance(reply, Reserved)


def copy_down(client: DeviceClient) -> None:
    """All there is, as far as the card gives it."""
    with contextlib.suppress(AssertionError):
        eventually(lambda: client.ask(Spill).num_left == 0 or client.status().memory.state == "lost", 10)


def day(daemon: Daemon) -> list[int]:
    """What clients do to a daemon: compute, copy down, make it forget, find again, on the card and beside it.

    Returns how many blocks of each prompt were found where all went well.
    """
    found = []
    with DeviceClient(daemon.folder) as on_card, DeviceClient(daemon.folder) as staged:
        if (opened := open_cache(on_card)) is not None:
            # The card has room for 1024 blocks.
            for prompt in (words("first", 300), words("second", 900), words("first", 300)):
                found.append(compute(on_card, opened.cache, prompt))
                copy_down(on_card)
        if (opened := open_cache(staged, staged=True)) is not None:
            found.append(compute(staged, opened.cache, words("second", 50)))
            found.append(compute(staged, opened.cache, words("third", 50)))
        if (opened := open_cache(on_card, layout=LARGE)) is not None:
            # Copies may hold a block of every segment for a moment.
            with contextlib.suppress(AssertionError):
                eventually(lambda: takes_over(on_card, opened.cache), 10)
        on_card.check()
        assert on_card.status().memories
    return found


def run(tmp_path: Path, machine: FakeMachine, rules: str, **memory: Any) -> Daemon:
    """A whole life of a daemon to whose driver this happens; fails where it does not happen."""
    daemon = Daemon(
        tmp_path / "run",
        environ={**machine.environ, "KVD_FAKECUDA_FAIL": rules},
        memory={
            "device": "cuda:0",
            "budget": 2 * SEGMENT,
            "segment": SEGMENT,
            "reserve_nbytes": 0,
            "prefault": "lazy",
            "host": {"budget": 4 * MIB},
            **memory,
        },
        tiers=HOST_TIER,
    )
    live(daemon)
    first_rule = rules.replace("+", "")
    assert machine.fired()[:1] == [first_rule], "the call that was to fail was never made"
    return daemon


def live(daemon: Daemon) -> None:
    """It does its work and stops, or does not start: whichever it is, cleanly."""
    try:
        daemon.start()
    except AssertionError:
        assert daemon.process is not None
        assert daemon.process.wait() in {5, 11}, daemon.log()
        errors = [line for line in daemon.log().splitlines() if line.startswith("ERROR")]
        assert len(errors) == 1, daemon.log()
        return
    try:
        day(daemon)
        assert daemon.is_alive
    finally:
        assert daemon.stop() == 0, daemon.log()
    assert "Traceback" not in daemon.log()


def test_a_day_without_a_fault_finds_again_what_had_to_go(tmp_path: Path, machine: FakeMachine) -> None:
    with running_daemon(tmp_path, machine=machine, budget=2 * SEGMENT, segment=SEGMENT, tiers=HOST_TIER) as daemon:
        assert day(daemon) == [0, 0, 300, 50, 0]


CALLS = [
    *(("cuMemAlloc_v2", number) for number in (1, 2, 3)),
    *(("cuMemGetInfo_v2", number) for number in (1, 2, 3, 4)),
    *(("cuIpcGetMemHandle", number) for number in (1, 2)),
    *(("cuMemsetD8_v2", number) for number in (1, 2)),
    *(("cuStreamSynchronize", number) for number in (1, 2, 3, 5, 8)),
    *(("cuMemcpyDtoHAsync_v2", number) for number in (1, 20, 320)),
    *(("cuMemcpyHtoDAsync_v2", number) for number in (1, 20)),
    *(("cuCtxSetCurrent", number) for number in (1, 2, 5, 30, 31)),
    *(("cuCtxGetCurrent", number) for number in (1, 5, 30)),
    *(
        (function, 1)
        for function in (
            "cuInit",
            "cuDriverGetVersion",
            "cuDeviceGetCount",
            "cuDeviceGet",
            "cuDeviceGetName",
            "cuDeviceGetUuid",
            "cuDeviceTotalMem_v2",
            "cuDevicePrimaryCtxRetain",
            "cuDevicePrimaryCtxRelease",
            "cuStreamCreate",
            "cuStreamDestroy_v2",
            "cuMemHostRegister_v2",
            "cuMemHostUnregister",
            "cuMemFree_v2",
        )
    ),
]


@pytest.mark.parametrize(("function", "number"), CALLS)
def test_each_driver_call_fails_once(tmp_path: Path, machine: FakeMachine, function: str, number: int) -> None:
    run(tmp_path, machine, f"{function}:{number}={UNKNOWN}")
    assert machine.held_nbytes() == 0


@pytest.mark.parametrize(
    ("function", "number"),
    [("cuMemAlloc_v2", 2), ("cuStreamSynchronize", 4), ("cuMemcpyDtoHAsync_v2", 9), ("cuMemGetInfo_v2", 3)],
)
def test_a_sticky_error_of_any_call(tmp_path: Path, machine: FakeMachine, function: str, number: int) -> None:
    run(tmp_path, machine, f"{function}:{number}={LOST}")


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("more", ["", "+"])
def test_the_card_is_out_of_memory(tmp_path: Path, machine: FakeMachine, number: int, more: str) -> None:
    daemon = run(tmp_path, machine, f"cuMemAlloc_v2:{number}{more}={OUT_OF_MEMORY}")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in daemon.log()


def test_a_lost_card_is_told_to_everybody_and_host_memory_serves_on(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="2MiB", tiers=HOST_TIER) as daemon,
        DeviceClient(daemon.folder) as client,
        DeviceClient(daemon.folder) as waiting,
        DeviceClient(daemon.folder) as beside,
    ):
        client.open_on()
        client.publish(1, *words("w", 500))
        waiting.open_on()
        # It waits for what another session computes, on a card that will be no more.
        begun = client.begin(1, hashes("later"), num_blocks=1)
        assert begun.num_announced == 1
        request = waiting.post(Begin, 1, hashes("later"), 1, 1, wait_s=60.0)
        cache = beside.open_on("host", model="beside")
        machine.lose_card(0)
        # What finds out first is a copy; the loop then tells those who wait.
        client.ask(Spill)
        client.release(1, [])
        eventually(lambda: client.status().memory.state == "lost")
        (failed,) = [waiting.receive()]
        assert (failed.request_id, failed.code) == (request, "cuda-device-lost")  # type: ignore[union-attr]
        for ask_for in (lambda: client.ask(Reserve, 1, 1), lambda: client.ask(Begin, 1, b"", 0, 1)):
            assert ask_for().code == "cuda-device-lost"
        named = client.ask(OpenCache, **client.opening("m", device=P40.uuid))
        assert named.code == "cuda-device-lost"
        assert P40.uuid in named.message
        # Who names no device gets host memory from now on.
        opened = client.ask(OpenCache, **client.opening("m"))
        assert (opened.device, opened.staged_from) == ("host", "")
        assert isinstance(client.ask(Reserve, opened.cache, 1), Reserved)
        assert isinstance(beside.ask(Reserve, cache, 1), Reserved)
        assert any("is lost" in warning for warning in client.status().warnings)
        client.check()


def test_a_killed_daemon_leaves_its_memory_to_those_who_map_it(  # case B12
    tmp_path: Path, machine: FakeMachine
) -> None:
    with contextlib.ExitStack() as stack:
        client = None
        with running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon:
            client = stack.enter_context(DeviceClient(daemon.folder))
            client.open_on()
            blocks = client.publish(1, *words("w", 10))
            assert client.read_block(blocks[9]) == content("w 9")
            other = stack.enter_context(client_process(daemon.folder, module=DEVICE, publish=5))
            old_epoch = client.epoch
            daemon.kill()
        assert client.next_datagram() is None
        assert client.read_block(blocks[9]) == content("w 9"), "a mapping outlives the daemon"
        assert machine.held_nbytes() >= SEGMENT, "and it holds the card's memory"
        with running_daemon(tmp_path, machine=machine, budget="4MiB") as daemon:
            fresh = stack.enter_context(DeviceClient(daemon.folder))
            assert isinstance(fresh.answer, Welcome)
            assert fresh.epoch != old_epoch
            fresh.open_on()
            assert fresh.begin(1, hashes("w 0"), num_blocks=1).num_cached == 0
            assert fresh.grants()[fresh.opened.pool, 0].epoch == fresh.epoch
            held_nbytes = machine.held_nbytes()
            client.close()
            other.kill()
            eventually(lambda: machine.held_nbytes() == SEGMENT)
            assert held_nbytes > SEGMENT
        fresh.close()
    assert machine.held_nbytes() == 0
