"""Pool rules of a real configuration file, in a real daemon above a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvd_client
from kvd.status import PoolStatus
from tests.client.kv import LAYOUT, fill, holds
from tests.support.daemon import ROOT, running_daemon
from tests.support.redis_servers import RealServer, running_server
from tests.support.wait import eventually

PROMPT = list(range(1, 162))
NUM_BLOCKS = 10
RULES = [
    {"name": "through", "models": ["through/*"], "spill": "write_through"},
    {"name": "twice", "models": ["twice/*"], "spill": "on_second_hit"},
    {"name": "drops", "models": ["drops/*"], "spill": "write_through", "after_promote": "drop"},
]


@pytest.fixture
def server() -> Iterator[RealServer]:
    with running_server() as server:
        yield server


def use(folder: Path, model: str) -> int:
    """Publishes the prompt; how many of its tokens were there already, checked number by number."""
    with kvd_client.connect(folder) as client, client.cache(model=model, layout=LAYOUT).sequence(PROMPT) as seq:
        num_cached = seq.num_cached_tokens
        assert holds(seq, PROMPT, num_cached)
        fill(seq, PROMPT)
        seq.commit()
    return num_cached


def pool(folder: Path, name: str) -> PoolStatus:
    with kvd_client.connect(folder) as client:
        return next(one for one in client.status().pools if one.name == name)


def spills(folder: Path, name: str) -> int:
    return pool(folder, name).counters["spills"]


def test_each_pool_copies_down_by_its_own_rule(tmp_path: Path, server: RealServer) -> None:
    with running_daemon(tmp_path, tiers={"redis": {"url": server.url}}, pools=RULES) as daemon:
        for model in ("plain", "twice/1", "through/1"):
            assert use(daemon.folder, model) == 0
        eventually(lambda: spills(daemon.folder, "through") == NUM_BLOCKS)
        # The last one asked for has arrived, so whatever the others had begun would have too.
        assert (spills(daemon.folder, "twice"), spills(daemon.folder, "")) == (0, 0)
        for _ in range(2):
            for model in ("plain", "twice/1"):
                assert use(daemon.folder, model) == 160
        eventually(lambda: spills(daemon.folder, "twice") == NUM_BLOCKS)
        assert spills(daemon.folder, "") == 0
        with kvd_client.connect(daemon.folder) as client:
            client.check()


def test_the_lower_copy_stays_or_goes_by_the_rule(tmp_path: Path, server: RealServer) -> None:
    shared = {"tiers": {"redis": {"url": server.url}}, "pools": RULES}
    with running_daemon(tmp_path, **shared) as daemon:
        for name, model in (("drops", "drops/1"), ("through", "through/1")):
            use(daemon.folder, model)
            eventually(lambda name=name: spills(daemon.folder, name) == NUM_BLOCKS)
    with running_daemon(tmp_path, **shared) as daemon, kvd_client.connect(daemon.folder) as client:
        for model, left in (("through/1", NUM_BLOCKS), ("drops/1", 0)):
            cache = client.cache(model=model, layout=LAYOUT)
            with cache.sequence(PROMPT) as seq:
                assert seq.num_cached_tokens == 160
            (tier,) = client.status().tiers
            assert tier.num_deletes == NUM_BLOCKS - left


def test_a_reload_takes_the_rules_of_the_file_over(tmp_path: Path, server: RealServer) -> None:
    config, log, folder = tmp_path / "kvd.toml", tmp_path / "log", tmp_path / "run"
    head = f'[memory]\nbudget = "64MiB"\nsegment = "1MiB"\nprefault = "lazy"\n[tiers.redis]\nurl = "{server.url}"\n'
    rule = '[[pools]]\nname = "a"\nmodels = ["a*"]\nspill = "{}"\n'
    config.write_text(head + rule.format("on_second_hit"))
    argv = [sys.executable, "-m", "kvd.cli", "serve", "--config", str(config), "--runtime-dir", str(folder)]
    with log.open("wb") as stderr:
        process = subprocess.Popen(argv, env=dict(os.environ), stderr=stderr, cwd=ROOT)
    try:
        eventually(lambda: "serves" in log.read_text(), 20)
        use(folder, "a1")
        assert spills(folder, "a") == 0
        config.write_text(head + rule.format("write_through") + "users = [1]\n")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "1 pool rules hold" in log.read_text())
        with kvd_client.connect(folder) as client:
            # The rule is about somebody else now, but a pool follows the rule of its name.
            assert client.cache(model="a1", layout=LAYOUT).match(PROMPT) == 0
            assert [one.name for one in client.status().pools] == ["a", ""]
        config.write_text(head + rule.format("often"))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "not taken over: spill of [[pools]] number 1, 'a'," in log.read_text())
    finally:
        process.terminate()
        assert process.wait(20) == 0
