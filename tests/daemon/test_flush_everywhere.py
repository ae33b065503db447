"""A flush by model, or of all, reaches what another run of the daemon, or another daemon, left in a real Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvd_client
from kvd.cli.app import app
from kvd.protocol.requests import Flush
from kvd.status import TierStatus
from tests.client.kv import LAYOUT, fill, holds
from tests.support.daemon import Daemon, running_daemon
from tests.support.raw_client import RawClient
from tests.support.redis_servers import running_server
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("either_home")
PROMPT = list(range(1, 162))
NUM_CACHED = 160
Tiers = Callable[[], dict[str, Any]]


@pytest.fixture(params=["redis", "embedded"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "embedded":
        yield {"redis": {"persistence": str(tmp_path / "kept"), "budget": 64 << 20}}
    else:
        with running_server() as server:
            yield {"redis": {"url": server.url}}


def compute(daemon: Daemon, model: str) -> int:
    """Publishes the prompt; how many of its tokens were there already, checked number by number."""
    with kvd_client.connect(daemon.folder) as client:
        cache = client.cache(model=model, layout=LAYOUT)
        with cache.sequence(PROMPT, wait_s=10) as seq:
            num_cached = seq.num_cached_tokens
            assert holds(seq, PROMPT, num_cached)
            fill(seq, PROMPT)
            seq.commit()
    return num_cached


def flush(daemon: Daemon, *args: str) -> dict[str, Any]:
    eventually(lambda: _redis(daemon).state == "up" and _redis(daemon).details.get("embedded", "up") == "up")
    result = CliRunner().invoke(app, ["flush", "--runtime-dir", str(daemon.folder), "--json", *args])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _redis(daemon: Daemon) -> TierStatus:
    with kvd_client.connect(daemon.folder) as client:
        (tier,) = client.status().tiers
        return tier


def test_by_model(tmp_path: Path, tiers: dict[str, Any]) -> None:  # case A9
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        assert compute(daemon, "one") == compute(daemon, "other") == 0
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        assert flush(daemon, "--model", "one") == {
            "num_namespaces": 1, "num_blocks": 0, "untold": [], "unlisted": [],
        }  # fmt: skip
        assert compute(daemon, "other") == NUM_CACHED
        assert compute(daemon, "one") == 0
        missing = CliRunner().invoke(app, ["flush", "--runtime-dir", str(daemon.folder), "--model", "nobody's"])
        assert missing.exit_code == 2
        assert "no namespace of a model" in missing.stderr


def test_all(tmp_path: Path, tiers: dict[str, Any]) -> None:  # case A9
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        for model in ("one", "other"):
            compute(daemon, model)
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        assert flush(daemon, "--all")["num_namespaces"] == 2
    with running_daemon(tmp_path, tiers=tiers) as daemon:
        assert compute(daemon, "one") == compute(daemon, "other") == 0


def test_of_another_daemon_that_still_runs(tmp_path: Path) -> None:  # case A9
    with running_server() as server:
        shared = {"redis": {"url": server.url}, "spill": "write_through"}
        with (
            running_daemon(tmp_path, name="one", tiers=shared) as one,
            running_daemon(tmp_path, name="two", tiers=shared) as two,
        ):
            compute(one, "model")
            eventually(lambda: _redis(one).num_puts == 10)
            assert flush(two, "--model", "model")["num_namespaces"] == 1
            with kvd_client.connect(one.folder) as client:
                # It hears of it by asking now and then.
                eventually(lambda: client.status().namespaces[0].counters["flushed"] > 0, 20)
            assert compute(two, "model") == 0


def test_a_flush_of_a_namespace_and_a_model_is_refused(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, RawClient(daemon.folder) as raw:
        reply = raw.ask(Flush, namespace=b"\1" * 32, model="model")
        assert reply.code == "invalid-request"
