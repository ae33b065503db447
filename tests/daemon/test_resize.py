"""`kvd resize` against real daemons: memory goes back at once, and nothing that anybody could want is lost by it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Self

import pytest
from click.testing import CliRunner, Result

from kvd.cli.app import app
from kvd.errors import BY_CODE
from kvd.protocol.replies import Resized
from kvd.protocol.requests import Release
from kvd.protocol.wire import pack_block_ids, unpack_block_ids
from tests.daemon.test_device_tiers import HOST_TIER, words
from tests.fakecuda.machine import MIB, P40, FakeMachine
from tests.support.daemon import Daemon, running_daemon
from tests.support.device_client import DeviceClient, content
from tests.support.raw_client import RawClient, hashes
from tests.support.wait import eventually

SEGMENT = 2 * MIB


def kvd_resize(daemon: Daemon, *args: str) -> Result:
    return CliRunner().invoke(app, ["resize", "--runtime-dir", str(daemon.folder), *args], prog_name="kvd")


def test_a_smaller_budget_copies_down_revokes_and_frees(tmp_path: Path, machine: FakeMachine) -> None:
    with (
        running_daemon(tmp_path, machine=machine, budget="8MiB", tiers=HOST_TIER) as daemon,
        DeviceClient(daemon.folder) as client,
    ):
        client.open_on()
        client.leave(4 * 512)
        result = kvd_resize(daemon, "4MiB", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == {
            "device": P40.uuid,
            "budget_nbytes": 4 * MIB,
            "used_nbytes": 4 * MIB,
            "draining_nbytes": 4 * MIB,
            "num_left": 0,
        }
        assert machine.held_nbytes() == 8 * MIB, "it is mapped still"
        assert len(client.revoked()) == 2
        client.confirm_closes()
        eventually(lambda: machine.held_nbytes() == 4 * MIB)
        status = client.status()
        assert status.memory.budget_nbytes == 4 * MIB
        assert status.namespaces[0].counters["dropped_unspilled"] == 0
        # What left is found again below.
        begun = client.begin(1, hashes(*words("word", 600)), num_blocks=600, wait_s=10.0)
        assert begun.num_cached == 600
        blocks = unpack_block_ids(begun.blocks)
        assert client.read_block(blocks[599]) == content("word 599")

        assert kvd_resize(daemon, "8MiB", "--device", P40.uuid[4:12]).stdout.startswith(
            f"{P40.uuid}: a budget of 8 MiB"
        )
        client.reserve(1, 2 * 512 + 1)
        assert machine.held_nbytes() == 8 * MIB
        client.check()


def test_what_clients_hold_goes_when_they_let_go(tmp_path: Path) -> None:
    with running_daemon(tmp_path, budget="4MiB") as daemon, RawClient(daemon.folder) as client:
        cache = client.open_cache()
        blocks = unpack_block_ids(client.reserve(cache, 1024))
        result = kvd_resize(daemon, "2MiB")
        assert result.stdout.splitlines() == [
            "host: a budget of 2 MiB, 4 MiB in pools",
            "2 MiB above it are held by clients, and go back when they close their sequences",
        ]
        client.ask(Release, cache, reserved=pack_block_ids(blocks), ack=True)
        assert client.status().memory.used_nbytes <= 2 * MIB


def test_sizes_that_cannot_be_and_devices_that_are_none(tmp_path: Path, machine: FakeMachine) -> None:
    with running_daemon(tmp_path, machine=machine, budget="8MiB") as daemon:
        for args, exit_code, says in (
            (["1MiB"], BY_CODE["invalid-request"].exit_code, "less than one segment"),
            (["65MiB"], BY_CODE["cuda-out-of-memory"].exit_code, "64 MiB beside its reserve"),
            (["100TiB", "--device", "host"], BY_CODE["out-of-memory"].exit_code, "this machine can give"),
            (["8MiB", "--device", "cuda:1"], BY_CODE["cuda-unavailable"].exit_code, "no device of this daemon"),
            (["lots"], 2, "is not a size"),
        ):
            result = kvd_resize(daemon, *args)
            assert (result.exit_code, says in result.stderr) == (exit_code, True), result.output
        assert kvd_resize(daemon, "4MiB", "--device", "cuda:0").exit_code == 0
        assert kvd_resize(daemon, "4MiB", "--device", "host").exit_code == 0


def test_a_budget_that_waits_for_copies_is_not_shown_as_if_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(contextlib.nullcontext[None]):
        def __enter__(self) -> Self:  # type: ignore[override]
            return self

        def resize(self, _nbytes: int, _device: str) -> Resized:
            return Resized(1, 1, "host", 8 * MIB, 8 * MIB, 0, 1500)

    monkeypatch.setattr("kvd_client.connect", lambda *_args, **_options: Client())
    monkeypatch.setattr("kvd.cli.resize.PATIENCE_S", 0.0)
    assert (
        CliRunner()
        .invoke(app, ["resize", "4MiB"])
        .stdout.startswith(
            "still copying 1,500 blocks down; the budget becomes 4 MiB after that\nhost: a budget of 8 MiB"
        )
    )
    assert json.loads(CliRunner().invoke(app, ["resize", "4MiB", "--json"]).stdout)["num_left"] == 1500
