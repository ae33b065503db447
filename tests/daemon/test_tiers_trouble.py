"""A real daemon while its Redis is absent, killed, frozen, emptied, or not one at all: it serves, and says so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvd_client
from kvd.cli.app import app
from kvd.status import Snapshot, TierStatus
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.support.daemon import Daemon, running_daemon
from tests.support.puppet_server import always, claiming, puppet_server
from tests.support.redis_servers import DEBIAN_REDIS, RealServer, running_server
from tests.support.stopwatch import Stopwatch
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("either_home")
PROMPT = list(range(1, 162))
NUM_CACHED = 160
NUM_BLOCKS = 10


@pytest.fixture
def server() -> Iterator[RealServer]:
    with running_server() as server:
        yield server


def external(url: str, **more: Any) -> dict[str, Any]:
    return {"redis": {"url": url}, **more}


def compute(daemon: Daemon, token_ids: list[int] = PROMPT) -> int:
    """Publishes a prompt; how many of its tokens were there already, checked number by number."""
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        with cache.sequence(token_ids) as seq:
            num_cached = seq.num_cached_tokens
            assert holds(seq, token_ids, num_cached)
            fill(seq, token_ids)
            seq.commit()
    return num_cached


def snapshot(daemon: Daemon) -> Snapshot:
    with kvd_client.connect(daemon.folder) as client:
        return client.status()


def redis_of(daemon: Daemon) -> TierStatus:
    return snapshot(daemon).tiers[-1]


def copy_down(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.folder) as client:
        eventually(lambda: client.spill() == 0, 20)


def forget_in_memory(daemon: Daemon) -> None:
    result = CliRunner().invoke(app, ["flush", "--runtime-dir", str(daemon.folder), "--all", "--tier", "pool"])
    assert result.exit_code == 0, result.output


def test_a_redis_that_is_absent_at_start_is_used_when_it_comes(tmp_path: Path) -> None:  # case C1
    late = RealServer()
    try:
        with running_daemon(tmp_path, tiers=external(late.url)) as daemon:
            assert compute(daemon) == 0
            assert compute(daemon) == NUM_CACHED
            eventually(lambda: redis_of(daemon).state != "up")
            assert any("redis" in warning for warning in snapshot(daemon).warnings)
            late.start()
            copy_down(daemon)
            forget_in_memory(daemon)
            assert compute(daemon) == NUM_CACHED
            assert redis_of(daemon).state == "up"
            assert sum(redis_of(daemon).errors.values()) > 0
    finally:
        late.close()


def test_a_redis_that_dies_and_comes_back_empty_costs_its_blocks_only(  # case C1
    tmp_path: Path, server: RealServer
) -> None:
    with running_daemon(tmp_path, tiers=external(server.url)) as daemon:
        compute(daemon)
        copy_down(daemon)
        server.kill()
        assert compute(daemon) == NUM_CACHED  # from memory
        forget_in_memory(daemon)
        assert compute(daemon) == 0
        server.start()
        eventually(lambda: compute(daemon, [5, *PROMPT]) >= 0 and redis_of(daemon).state == "up")
        copy_down(daemon)
        forget_in_memory(daemon)
        assert compute(daemon) == NUM_CACHED
        with kvd_client.connect(daemon.folder) as client:
            client.check()


def test_status_answers_within_a_second_while_every_tier_is_stuck(  # case F7
    tmp_path: Path, server: RealServer
) -> None:
    with running_daemon(tmp_path, tiers=external(server.url, drain_s=1.0)) as daemon:
        compute(daemon)
        copy_down(daemon)
        server.freeze()
        forget_in_memory(daemon)
        compute(daemon)
        watch = Stopwatch(daemon.pid)
        result = CliRunner().invoke(app, ["status", "--runtime-dir", str(daemon.folder), "--json"])
        assert watch.elapsed_s() < 1.0
        (tier,) = json.loads(result.stdout)["tiers"]
        assert tier["name"] == "redis"
        assert tier["errors"]
        eventually(lambda: compute(daemon, [6, *PROMPT]) >= 0 and redis_of(daemon).state != "up")
        page = CliRunner().invoke(app, ["status", "--runtime-dir", str(daemon.folder)]).stdout
        assert "The redis tier is" in page
        stopping_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - stopping_s < 8
        server.thaw()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (always(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "not a Redis"),
        (claiming("# Server\r\nredis_version:5.0.14\r\nredis_mode:standalone\r\n"), "kvd needs 6.2"),
        (None, "answer"),
    ],
    ids=["http", "too old", "silent"],
)
def test_what_is_no_redis_of_ours_is_named_in_the_status(tmp_path: Path, answer: Any, says: str) -> None:
    with puppet_server(answer) as url, running_daemon(tmp_path, tiers=external(url, drain_s=0.0)) as daemon:
        assert compute(daemon) == 0
        assert compute(daemon) == NUM_CACHED
        eventually(lambda: compute(daemon, [8, *PROMPT]) >= 0 and redis_of(daemon).state != "up")
        (warning,) = snapshot(daemon).warnings
        assert "memory serves on" in warning
        assert says in warning
        assert "\n" not in warning


def test_a_wrong_password_is_named_and_never_shown(tmp_path: Path) -> None:  # case C1
    with running_server(DEBIAN_REDIS, "--requirepass", "right-one") as server:
        tiers = external(server.url, drain_s=0.0)
        (secret := tmp_path / "secret").write_text("wrong-one\n")
        tiers["redis"]["password_file"] = str(secret)
        with running_daemon(tmp_path, tiers=tiers) as daemon:
            assert compute(daemon) == 0
            eventually(lambda: redis_of(daemon).state != "up")
            (warning,) = snapshot(daemon).warnings
            assert "password" in warning
            page = CliRunner().invoke(app, ["status", "--runtime-dir", str(daemon.folder), "--json"]).stdout
            assert "wrong-one" not in page + daemon.log()


@pytest.mark.parametrize(
    "redis",
    [{"url": "http://nowhere"}, {"url": "redis://host", "password_file": "/nonexistent"}],
    ids=["wrong url", "no password file"],
)
def test_a_tier_that_cannot_be_is_a_warning_of_log_and_status(tmp_path: Path, redis: dict[str, str]) -> None:
    with running_daemon(tmp_path, tiers={"redis": redis}) as daemon:
        assert compute(daemon) == 0
        assert compute(daemon) == NUM_CACHED
        status = snapshot(daemon)
        assert status.tiers == []
        (warning,) = status.warnings
        assert warning.startswith("no Redis tier: ")
        assert daemon.log().count(warning) == 1


def test_the_embedded_server_keeps_blocks_over_a_restart(tmp_path: Path) -> None:  # case C5
    tiers = {"redis": {"persistence": str(tmp_path / "kept"), "budget": 64 << 20}}
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        eventually(lambda: redis_of(daemon).details["embedded"] == "up")
        assert compute(daemon) == 0
        # A client that still holds its blocks when the daemon stops does not cost them.
        client = kvd_client.connect(daemon.folder)
        seq = client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
        assert daemon.stop() == 0
        seq.close()
        client.close()
        assert not list(daemon.folder.iterdir())
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        eventually(lambda: redis_of(daemon).details["embedded"] == "up")
        assert compute(daemon) == NUM_CACHED


def test_an_embedded_server_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with running_daemon(tmp_path, tiers={"redis": {"budget": 64 << 20}}) as daemon:
        eventually(lambda: redis_of(daemon).details["embedded"] == "up")
        compute(daemon)
        copy_down(daemon)
        (child,) = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split() or _children(daemon)
        os.kill(int(child), signal.SIGKILL)
        eventually(lambda: redis_of(daemon).details["restarts"] == "1")
        eventually(lambda: compute(daemon, [4, *PROMPT]) >= 0 and redis_of(daemon).state == "up")
        copy_down(daemon)


def _children(daemon: Daemon) -> list[str]:
    """Of any thread: a process belongs to the thread that made it."""
    tasks = Path(f"/proc/{daemon.pid}/task").iterdir()
    return [pid for task in tasks for pid in (task / "children").read_text().split()]


def test_readiness_does_not_wait_for_the_embedded_server(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with running_daemon(tmp_path, tiers={"redis": {"persistence": str(kept), "budget": 64 << 20}}) as daemon:
        assert "ready after" in daemon.log()
        ready_s = float(daemon.log().split("ready after ")[1].split()[0])
        assert ready_s < 2.0
