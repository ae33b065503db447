"""`kvd flush`, `kvd spill`, `kvd prefetch` against real daemons with a real Redis below, and with nothing below."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvd_client
from kvd.bench.writer import seal_prompt
from kvd.cli.app import app
from kvd.layout import KVLayout
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import RealServer, running_server
from tests.support.wait import eventually

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64)
PROMPT = list(range(165))
NUM_BLOCKS, NUM_TOKENS = 10, 160


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def daemon(server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tiers = {"redis": {"url": server.url}, "drain_s": 0.0}
    with running_daemon(tmp_path_factory.mktemp("daemon"), tiers=tiers) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.folder) as client:
        yield client


def kvd(daemon: Daemon, command: str, *args: str) -> Result:
    return CliRunner().invoke(app, [command, "--runtime-dir", str(daemon.folder), *args], prog_name="kvd")


def written(client: kvd_client.Client, model: str) -> kvd_client.Cache:
    cache = client.cache(model=model, layout=LAYOUT)
    seal_prompt(cache, PROMPT, b"\1")
    return cache


def num_found(cache: kvd_client.Cache) -> int:
    with cache.sequence(PROMPT, wait_s=5) as seq:
        return seq.num_cached_tokens


def prompt_file(folder: Path, cache: kvd_client.Cache, name: str = "prompt.json") -> str:
    content = {"namespace": dataclasses.asdict(cache.namespace), "token_ids": PROMPT}
    (path := folder / name).write_text(json.dumps(content))
    return str(path)


def test_spilled_blocks_come_back_and_flushed_ones_do_not(daemon, client):  # case A9
    cache = written(client, "spilled")
    assert kvd(daemon, "spill").stdout.endswith("every idle block has a copy below\n")
    assert kvd(daemon, "flush", "--model", "spilled", "--tier", "pool").exit_code == 0
    assert num_found(cache) == NUM_TOKENS
    result = kvd(daemon, "flush", "--model", "spilled")
    assert result.stdout == f"flushed 1 namespace: {NUM_BLOCKS} blocks left memory\n"
    assert num_found(cache) == 0


def test_one_tier_alone_may_forget(daemon, client):
    cache = written(client, "one tier")
    kvd(daemon, "spill")
    assert kvd(daemon, "flush", "--model", "one tier", "--tier", "redis").stdout == (
        "flushed 1 namespace: 0 blocks left memory\n"
    )
    assert num_found(cache) == NUM_TOKENS
    kvd(daemon, "flush", "--model", "one tier", "--tier", "pool")
    assert num_found(cache) == 0


def test_a_namespace_is_named_by_its_first_digits(daemon, client):
    written(client, "by digits")
    (digest,) = (one.digest for one in client.status().namespaces if one.model == "by digits")
    result = kvd(daemon, "flush", "--namespace", digest[:12], "--json")
    assert json.loads(result.stdout) == {"num_namespaces": 1, "num_blocks": NUM_BLOCKS, "untold": [], "unlisted": []}
    assert kvd(daemon, "flush", "--namespace", digest).exit_code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name one of --namespace"),
        (["--all", "--model", "x"], "name one of --namespace"),
        (["--model", "nobody's"], "no namespace of a model"),
        (["--namespace", "xyz"], "is no digest"),
        (["--namespace", "ab"], "too short"),
        (["--namespace", "0" * 63], "it begins none"),
        (["--all", "--tier", "tape"], "there is no tier 'tape'"),
    ],
)
def test_a_flush_that_names_nothing_is_an_error(daemon, client, args, words):
    written(client, "kept")
    result = kvd(daemon, "flush", *args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_prefetch_brings_a_prompt_up(daemon, client, tmp_path):
    cache = written(client, "prefetched")
    kvd(daemon, "spill")
    kvd(daemon, "flush", "--model", "prefetched", "--tier", "pool")
    assert _num_resident(client, "prefetched") == 0
    result = kvd(daemon, "prefetch", path := prompt_file(tmp_path, cache))
    assert result.stdout == f"{path}: {NUM_TOKENS} of {len(PROMPT)} tokens in memory\n"
    assert _num_resident(client, "prefetched") == NUM_BLOCKS


def test_prefetch_without_waiting_and_as_json(daemon, client, tmp_path):
    cache = written(client, "later")
    kvd(daemon, "spill")
    kvd(daemon, "flush", "--model", "later", "--tier", "pool")
    files = [prompt_file(tmp_path, cache, name) for name in ("one.json", "two.json")]
    results = json.loads(kvd(daemon, "prefetch", "--no-wait", "--json", *files).stdout)
    assert [one["file"] for one in results] == files
    assert all(one["num_resident"] + one["num_below"] == NUM_TOKENS for one in results)
    eventually(lambda: _num_resident(client, "later") == NUM_BLOCKS)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"token_ids": [1]}', "null", '{"namespace": {"model": "m"}}'])
def test_a_file_that_is_no_prompt_is_one_line(daemon, tmp_path, text):
    (path := tmp_path / "wrong.json").write_text(text)
    result = kvd(daemon, "prefetch", str(path))
    assert result.exit_code == 2
    assert "is no prompt" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("change", [{"token_ids": [-1]}, {"token_ids": [1.5]}, {"more": 1}, {"namespace": {}}])
def test_a_prompt_with_a_wrong_part_is_refused(daemon, client, tmp_path, change):
    content: dict[str, Any] = json.loads(Path(prompt_file(tmp_path, written(client, "part"))).read_text())
    (path := tmp_path / "wrong.json").write_text(json.dumps(content | change))
    assert kvd(daemon, "prefetch", str(path)).exit_code == 2


def test_a_block_without_whole_pages_is_refused(daemon, client, tmp_path):
    content = json.loads(Path(prompt_file(tmp_path, written(client, "pages"))).read_text())
    content["namespace"]["layout"]["head_dim"] = 3
    (path := tmp_path / "wrong.json").write_text(json.dumps(content))
    assert "whole number" in kvd(daemon, "prefetch", str(path)).stderr


def test_spill_gives_up_when_the_tier_is_gone(tmp_path):
    with (
        running_server() as server,
        running_daemon(tmp_path, tiers={"redis": {"url": server.url}, "drain_s": 0.0}) as daemon,
    ):
        server.freeze()
        with kvd_client.connect(daemon.folder) as client:
            written(client, "stuck")
            result = kvd(daemon, "spill", "--patience", "0.5")
        assert result.exit_code == 1
        assert f"{NUM_BLOCKS} blocks could not be copied" in result.stderr
        result = kvd(daemon, "spill", "--patience", "0", "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout) == {"num_copied": 0, "num_left": NUM_BLOCKS}
        result = kvd(daemon, "flush", "--all")
        assert result.exit_code == 1
        assert "down just now, and told before anything else: redis" in result.stdout
        assert "redis cannot say what else is held there" in result.stderr
        server.thaw()
        eventually(lambda: kvd(daemon, "flush", "--all").exit_code == 0)


def test_without_a_tier_spill_says_so_and_flush_and_prefetch_work(tmp_path):
    with running_daemon(tmp_path) as daemon, kvd_client.connect(daemon.folder) as client:
        cache = written(client, "alone")
        result = kvd(daemon, "spill")
        assert result.exit_code == 2
        assert "there is no tier below" in result.stderr
        path = prompt_file(tmp_path, cache)
        assert kvd(daemon, "prefetch", path).stdout == f"{path}: {NUM_TOKENS} of {len(PROMPT)} tokens in memory\n"
        assert kvd(daemon, "flush", "--all").exit_code == 0
        assert num_found(cache) == 0


def _num_resident(client: kvd_client.Client, model: str) -> int:
    return next(one.num_sealed for one in client.status().namespaces if one.model == model)
