"""Merging, origins, and every kind of wrong configuration: one line that says where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.config.keys import KEYS
from kvd.config.load import as_flat, load
from kvd.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "kvd.toml"
        path.write_text(text)
        return path

    return write


def test_without_anything_the_defaults_hold():
    loaded = load(None, {}, {})
    assert set(loaded.origin.values()) == {"default"}
    assert loaded.config.memory.budget == "auto"
    assert loaded.config.runtime_dir == "/run/kvd"


def test_flags_beat_the_environment_which_beats_the_file(toml):
    path = toml('[memory]\nbudget = "4GiB"\nchecksums = true\n[limits]\ncredits = 7\n')
    environ = {"KVD_MEMORY_BUDGET": "2 GiB", "KVD_LIMITS_CREDITS": "8"}
    loaded = load(path, environ, {"memory.budget": "1GiB", "memory.segment": None})
    assert loaded.config.memory.budget == 1 * GIB
    assert loaded.config.limits.credits == 8
    assert loaded.config.memory.checksums is True
    assert loaded.origin["memory.budget"] == "flag --memory-budget"
    assert loaded.origin["limits.credits"] == "environment KVD_LIMITS_CREDITS"
    assert loaded.origin["memory.checksums"] == f"file {path}"
    assert loaded.origin["memory.segment"] == "default"


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("on", True), ("1", True), ("No", False), ("0", False), ("off", False)]
)
def test_booleans_of_the_environment(text, value):
    assert load(None, {"KVD_MEMORY_CHECKSUMS": text}).config.memory.checksums is value


def test_an_empty_flag_is_no_folder():
    with pytest.raises(ConfigError, match=r"runtime_dir .*--runtime-dir"):
        load(None, {}, {"runtime_dir": ""})


def test_an_empty_variable_is_one_not_set():
    assert load(None, {"KVD_RUNTIME_DIR": ""}).config.runtime_dir == "/run/kvd"
    assert load(None, {"KVD_MEMORY_BUDGET": ""}).origin["memory.budget"] == "default"


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_key_can_be_set_from_the_environment(key):
    by_kind = {"true or false": "true"}
    is_share = key.kind == "a number from 0 to 1"
    number = "2MiB" if key.is_size else by_kind.get(key.kind, "0.1" if is_share else "9")
    text = key.choices[0] if key.choices else str(key.default) or "some" if key.is_text else number
    assert load(None, {key.env: text}).origin[key.name] == f"environment {key.env}"


def test_a_bound_set_alone_cuts_the_default():
    loaded = load(None, {}, {"waits.max_s": 5})
    assert loaded.config.waits.default_s == 5
    assert loaded.origin["waits.default_s"] == "default, cut to waits.max_s"


def test_foreign_variables_are_named_but_harmless():
    assert load(None, {"KVD_SERVICE_HOST": "10.0.0.1", "KVD_CONFIG": "x"}).ignored_environment == ("KVD_SERVICE_HOST",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[memory]\nbugdet = 1", ["memory.bugdet", "did you mean memory.budget?"]),
        ("[memroy]\nbudget = 1", ["memroy", "did you mean memory?"]),
        ('budget = "1GiB"', ["budget", "did you mean memory.budget?"]),
        ("zzz = 1", ["zzz", "kvd config show"]),
        ("memory = 1", ["memory", "[memory]"]),
        ("[[memory]]\nbudget = 1", ["memory", "table"]),
        ("[memory]\nbudget = 0", ["memory.budget", "a size from 4KiB", "not 0"]),
        ("[memory]\nbudget = -1", ["memory.budget", "not -1"]),
        ("[memory]\nbudget = 1e9", ["memory.budget"]),
        ("[memory]\nbudget = true", ["memory.budget", "not True"]),
        ('[memory]\nbudget = "lots"', ["memory.budget", "not 'lots'"]),
        ('[memory]\nbudget = "9999TiB"', ["memory.budget", "1024TiB"]),
        ("[memory]\nbudget = [1]", ["memory.budget"]),
        ('[memory]\nsegment = "5001B"', ["memory.segment", "multiple of 4KiB"]),
        ("[memory]\nchecksums = 1", ["memory.checksums", "true or false"]),
        ('[memory]\nprefault = "eager"', ["memory.prefault", "background, lazy"]),
        ("[waits]\ndefault_s = nan", ["waits.default_s"]),
        ("[waits]\nmax_s = inf", ["waits.max_s"]),
        ('[limits]\ncredits = "4"', ["limits.credits", "not '4'"]),
        ("[limits]\ncredits = 0", ["limits.credits", "from 1 to"]),
        ("[access]\ngroup = 3", ["access.group", "text"]),
        ('[memory]\nbudget = "4MiB"\nsegment = "8MiB"', ["memory.segment (8MiB", "memory.budget (4MiB"]),
        ("[waits]\ndefault_s = 500", ["waits.default_s (500", "waits.max_s (300"]),
        ('[limits]\nsession_nbytes = "2GiB"\nuid_nbytes = "1GiB"', ["limits.session_nbytes", "limits.uid_nbytes"]),
        ("tiers = 1", ["tiers", "[tiers]"]),
        ("[tiers]\nredis = 1", ["tiers.redis", "[tiers.redis]"]),
        ("[tiers.redsi]\nurl = ''", ["tiers.redsi", "did you mean tiers.redis?"]),
        ("[tiers.redis]\nurll = ''", ["tiers.redis.urll", "did you mean tiers.redis.url?"]),
        ("[tiers]\nspill = 'never'", ["tiers.spill", "on_evict, write_through, on_second_hit"]),
        ("[tiers]\nlow_watermark = 0.5", ["tiers.low_watermark (0.5", "tiers.high_watermark (0.2"]),
        ("[tiers]\nhigh_watermark = 2", ["tiers.high_watermark", "from 0 to 1"]),
        ("[tiers.host]\nbudget = 4096", ["tiers.host.budget", "0 or at least 1MiB", "not 4KiB"]),
        ("[tiers.redis]\nttl_s = 0", ["tiers.redis.ttl_s", "from 1 to 31536000", "not 0"]),
        ("[tiers.redis]\nttl_s = 1.5", ["tiers.redis.ttl_s", "whole number"]),
        ("[tiers.redis]\nbudget = '1MiB'", ["tiers.redis.budget", "from 8MiB", "auto"]),
        ("[tiers.redis]\nprefix = 'a*'", ["tiers.redis.prefix", "not 'a*'", "letters, digits and : _ . -"]),
        ("runtime_dir = ''", ["runtime_dir must be text, the path of a folder", "not ''"]),
        ("[tiers.redis]\ncodec = 'gzip'", ["tiers.redis.codec", "raw, lz4, zstd"]),
        ("not toml at all", ["is not TOML"]),
        ("runtime_dir = 3", ["runtime_dir", "text"]),
        ('runtime_dir = "/tmp/a\\u0000b"', ["NUL"]),
        ('runtime_dir = "/' + "x" * 200 + '"', ["runtime_dir", "shorter"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(toml, text, words):
    with pytest.raises(ConfigError) as caught:
        load(toml(text), {})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("variable", ["KVD_MEMORY_BUDGT", "KVD_MEMRY_BUDGET", "KVD_RUNTIMEDIR"])
def test_a_misspelt_variable_is_an_error_that_names_the_nearest(variable):
    with pytest.raises(ConfigError, match="did you mean KVD_"):
        load(None, {variable: "1"})


def test_a_wrong_flag_names_the_flag():
    with pytest.raises(ConfigError, match="flag --limits-credits"):
        load(None, {}, {"limits.credits": "many"})


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load(tmp_path / "absent.toml", {})


def test_flat_values_follow_the_schema():
    assert list(as_flat(load(None, {}).config)) == list(KEYS)


def test_sections_nest_in_the_file_the_environment_and_flags(toml):
    path = toml('[tiers]\nspill = "write_through"\n[tiers.redis]\nurl = "unix:///r.sock"\nttl_s = 60\n')
    environ = {"KVD_TIERS_REDIS_URL": "redis://host", "KVD_TIERS_HOST_BUDGET": "1GiB"}
    loaded = load(path, environ, {"tiers.redis.budget": "64MiB"})
    tiers = loaded.config.tiers
    assert (tiers.spill, tiers.redis.url, tiers.redis.ttl_s) == ("write_through", "redis://host", 60)
    assert (tiers.host.budget, tiers.redis.budget) == (GIB, 64 << 20)
    assert loaded.origin["tiers.redis.url"] == "environment KVD_TIERS_REDIS_URL"
    assert loaded.origin["tiers.redis.budget"] == "flag --tiers-redis-budget"


def test_an_empty_url_of_a_file_is_no_redis(toml):
    assert load(toml('[tiers.redis]\nurl = ""\n'), {}).config.tiers.redis.url == ""


def test_folders_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    redis = load(None, {"KVD_TIERS_REDIS_PERSISTENCE": "state"}).config.tiers.redis
    assert redis.persistence == str(tmp_path / "state")


def test_blocks_are_kept_in_the_folder_that_a_service_manager_gives(toml):  # case C5
    environ = {"STATE_DIRECTORY": "/var/lib/kvd:/var/lib/other"}
    loaded = load(None, environ)
    assert loaded.config.tiers.redis.persistence == "/var/lib/kvd/redis"
    assert loaded.origin["tiers.redis.persistence"] == "environment STATE_DIRECTORY"
    assert load(toml('[tiers.redis]\npersistence = ""\n'), environ).config.tiers.redis.persistence == ""
    assert load(None, environ, {"tiers.redis.persistence": "/mnt"}).config.tiers.redis.persistence == "/mnt"


def test_the_password_variable_is_no_key():
    assert load(None, {"KVD_REDIS_PASSWORD": "x"}).ignored_environment == ()


def test_a_wrong_secret_is_not_quoted():
    with pytest.raises(ConfigError) as caught:
        load(None, {"KVD_TIERS_REDIS_URL": "redis://:hunter2@host/" + "x" * 5000})
    assert "hunter2" not in str(caught.value)
