"""`kvd why`, `kvd pin`, `kvd pools`, `kvd clients` against real daemons, with a real Redis below and with nothing."""

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
from kvd.hashing import Namespace
from kvd.layout import KVLayout
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import RealServer, running_server
from tests.support.wait import eventually

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64)
PROMPT = list(range(1000, 1165))


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
        client.flush()
        for pin in client.status().pins:
            client.unpin(pin.pin)


def kvd(daemon: Daemon, command: str, *args: str) -> Result:
    return CliRunner().invoke(app, [command, "--runtime-dir", str(daemon.folder), *args], prog_name="kvd")


def prompt_file(folder: Path, token_ids: list[int] = PROMPT, *, name: str = "prompt.json", **fields: Any) -> str:
    namespace = Namespace(**{"model": "m", "layout": LAYOUT, **fields})
    content = {"namespace": dataclasses.asdict(namespace), "token_ids": token_ids}
    (path := folder / name).write_text(json.dumps(content))
    return str(path)


def write(client: kvd_client.Client, token_ids: list[int] = PROMPT, **fields: Any) -> kvd_client.Cache:
    cache = client.cache(**{"model": "m", "layout": LAYOUT, **fields})
    seal_prompt(cache, token_ids, b"\1")
    return cache


def why(daemon: Daemon, *args: str) -> dict[str, Any]:
    result = kvd(daemon, "why", *args, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_whole_prompt_is_found(daemon, client, tmp_path):
    write(client)
    result = kvd(daemon, "why", path := prompt_file(tmp_path))
    assert result.stdout == (
        f"{path}: 165 tokens, 160 of them in full blocks of 16\n"
        "  memory  160 of 160\n"
        "  redis   160 of 160\n"
        "All of it is found.\n"
        "The last 5 fill no block; those are always computed.\n"
    )


def test_each_tier_says_how_far_it_reaches(daemon, client, tmp_path):
    write(client)
    client.spill()
    kvd(daemon, "spill")
    client.flush(model="m", tier="pool")
    found = why(daemon, prompt_file(tmp_path))
    assert (found["num_resident"], found["by_tier"]) == (0, {"redis": 160})


def test_the_block_where_prompts_part_is_named(daemon, client, tmp_path):
    write(client)
    other = [*PROMPT[:100], 7, *PROMPT[101:]]
    result = kvd(daemon, "why", prompt_file(tmp_path, other))
    assert "Tokens 96 to 111 are the first block found nowhere" in result.stdout


def test_against_another_file_the_token_is_named(daemon, client, tmp_path):
    write(client)
    other = [*PROMPT[:100], 7, *PROMPT[101:]]
    args = (prompt_file(tmp_path, other), "--against", prompt_file(tmp_path, name="cached.json"))
    assert "cached.json differs from token 100 on: 7 here, 1100 there; 160 of its tokens are cached." in (
        kvd(daemon, "why", *args).stdout
    )
    against = why(daemon, *args)["against"]
    assert (against["token"], against["ours"], against["theirs"], against["differences"]) == (100, 7, 1100, [])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"layout": dataclasses.replace(LAYOUT, dtype="float32")}, "dtype"),
        ({"layout": dataclasses.replace(LAYOUT, block_tokens=32)}, "block_tokens"),
        ({"engine": "raw/2"}, "engine"),
        ({"adapter": "sha256:ab"}, "adapter"),
        ({"positional": '{"rope":"linear"}'}, "positional"),
        ({"salt": "s"}, "salt"),
        ({"model": "m@2"}, "model"),
    ],
)
def test_the_first_field_that_differs_is_named(daemon, client, tmp_path, fields, field):
    write(client, **fields)
    found = why(daemon, prompt_file(tmp_path))
    assert found["num_resident"] == 0
    assert found["nearest"]["num_tokens"] == 160
    assert [one["field"] for one in found["nearest"]["differences"]] == [field]


def test_two_salts_are_told_apart_without_showing_them(daemon, client, tmp_path):
    write(client, salt="secret-1")
    result = kvd(daemon, "why", prompt_file(tmp_path, salt="secret-2"))
    assert "  salt: (not shown) here, (not shown) there" in result.stdout
    assert "secret" not in result.stdout


def test_the_key_of_the_positional_settings_is_named(daemon, client, tmp_path):
    write(client, positional='{"max":1,"rope":{"theta":10000}}')
    found = why(daemon, prompt_file(tmp_path, positional='{"max":1,"rope":{"theta":500000}}'))
    (one,) = found["nearest"]["differences"]
    assert one == {"field": "positional.rope", "ours": '{"theta": 500000}', "theirs": '{"theta": 10000}'}


@pytest.mark.parametrize(
    ("cached", "what"), [(PROMPT[1:], "without its first token (1000)"), ([1, *PROMPT], "with token 1 before it")]
)
def test_a_bos_too_many_or_too_few_is_found_out(daemon, client, tmp_path, cached, what):
    write(client, cached)
    found = why(daemon, prompt_file(tmp_path))
    assert found["variant"] == what
    assert found["variant_num_tokens"] >= 160
    assert f"The same prompt {what} is cached" in kvd(daemon, "why", prompt_file(tmp_path)).stdout


def test_what_happened_to_the_namespace_is_told(daemon, client, tmp_path):
    assert any(
        "Nothing was ever published" in text
        for text in why(daemon, prompt_file(tmp_path, model="new"))["circumstances"]
    )
    write(client)
    client.flush(model="m")
    assert any("were flushed" in text for text in why(daemon, prompt_file(tmp_path))["circumstances"])


def test_asking_leaves_the_status_page_as_it_was(daemon, client, tmp_path):
    why(daemon, prompt_file(tmp_path, model="asked-about"))
    assert "asked-about" not in kvd(daemon, "status").stdout


def test_a_pin_holds_what_is_there_and_what_is_below(daemon, client, tmp_path):
    write(client)
    kvd(daemon, "spill")
    client.flush(model="m", tier="pool")
    result = kvd(daemon, "pin", prompt_file(tmp_path))
    (pin,) = client.status().pins
    assert result.stdout == (
        f"prompt.json: pin {pin.pin}, 160 of 160 tokens resident; not kept across a restart: the daemon has no state "
        "folder\n"
    )
    assert pin.pin in kvd(daemon, "pin", "--list").stdout
    assert pin.pin in kvd(daemon, "status").stdout
    assert kvd(daemon, "pin", "--remove", pin.pin).stdout == f"removed {pin.pin}\n"
    assert kvd(daemon, "pin", "--list").stdout == "nothing is pinned\n"


def test_what_nobody_computed_is_held_as_soon_as_somebody_does(daemon, client, tmp_path):
    (pinned,) = json.loads(kvd(daemon, "pin", "--no-wait", "--json", prompt_file(tmp_path)).stdout)
    assert pinned["num_tokens_resident"] == 0
    write(client)
    eventually(lambda: client.status().pins[0].num_tokens_resident == 160)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name a FILE"),
        (["--list", "--remove", "x"], "name a FILE"),
        (["--remove", "x"], "12 hex digits"),
        (["--remove", "0" * 12], "no pin"),
    ],
)
def test_a_pin_that_names_nothing_is_an_error(daemon, client, args, words):
    result = kvd(daemon, "pin", *args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_pins_are_up_again_after_a_restart(server, tmp_path, monkeypatch):  # case C5
    (state := tmp_path / "state").mkdir()
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    tiers = {"redis": {"url": server.url, "prefix": "pins:"}}
    with running_daemon(tmp_path, tiers=tiers) as daemon, kvd_client.connect(daemon.folder) as client:
        write(client)
        kvd(daemon, "pin", prompt_file(tmp_path))
        (pin,) = client.status().pins
        assert pin.is_lasting
        eventually(lambda: list(state.rglob(f"{pin.pin}.pin")))
        eventually(lambda: client.status().mover.counters["spilled"] == 10)
        daemon.kill()  # what was pinned is below already
    with running_daemon(tmp_path, tiers=tiers) as daemon, kvd_client.connect(daemon.folder) as client:
        eventually(lambda: client.status().pins[0].num_tokens_resident == 160)
        assert client.status().pins[0].pin == pin.pin
        with client.cache(model="m", layout=LAYOUT).sequence(PROMPT, wait_s=0) as seq:
            assert seq.num_cached_tokens == 160


def test_tables_of_their_own(daemon, client):
    cache = write(client)
    with cache.sequence(PROMPT):
        rows = [line for line in kvd(daemon, "pools").stdout.splitlines() if "gid:" in line]
        assert rows[0].split()[0] == "0"
        as_json = json.loads(kvd(daemon, "pools", "--json").stdout)
        assert as_json[0]["num_sealed"] == 10
        assert len(as_json) == len(rows)
        # This process asks, so it does not show itself.
        assert kvd(daemon, "clients").stdout == "no clients\n"
        assert json.loads(kvd(daemon, "clients", "--json").stdout) == []
