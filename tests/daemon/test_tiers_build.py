"""Tiers from the configuration: what is wrong with one is a sentence, and the daemon serves from memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.build import Sizes
from kvd.build.tiers import LowerTiers, auto_redis_budget_nbytes, build_tiers, check_tiers
from kvd.config.schema import HostTier, RedisTier, Tiers
from kvd.errors import ConfigError, KvdError, TierUnavailable
from kvd.tiers import embedded_config
from kvd.tiers.embedded import hold_persistence_dir

MIB, GIB = 1 << 20, 1 << 30
SIZES = Sizes(64 * MIB, 16 * MIB)


def build(tmp_path: Path, tiers: Tiers, *, available_nbytes: int = GIB, **environ: str) -> LowerTiers:
    built = build_tiers(tiers, SIZES, runtime_dir=tmp_path, available_nbytes=available_nbytes, environ=environ)
    if built.stack is not None:
        built.stack.close()
    return built


@pytest.mark.parametrize("url", ["", "off"])
def test_without_tiers_there_is_no_stack(tmp_path, url):
    assert build(tmp_path, Tiers(redis=RedisTier(url=url))) == LowerTiers(None, ())


def test_host_comes_before_redis_and_only_redis_lasts(tmp_path):
    built = build(tmp_path, Tiers(host=HostTier(budget=32 * MIB), redis=RedisTier(url="unix:///nobody")))
    assert built.stack is not None
    assert built.stack.names == ("host", "redis")
    assert built.stack.has_lasting


@pytest.mark.parametrize("persistence", ["", "kept"])
def test_an_embedded_server_lasts_with_a_persistence_folder(tmp_path, persistence):
    folder = str(tmp_path / persistence) if persistence else ""
    built = build(tmp_path, Tiers(redis=RedisTier(persistence=folder)))
    assert built.stack is not None
    assert built.stack.has_lasting is bool(persistence)
    assert built.warnings == ()


def test_a_persistence_folder_that_another_daemon_uses_is_left_alone_and_named(tmp_path):
    (kept := tmp_path / "kept").mkdir()
    held = hold_persistence_dir(kept)
    built = build(tmp_path, Tiers(redis=RedisTier(persistence=str(kept))))
    os.close(held)
    assert built.stack is not None
    assert not built.stack.has_lasting
    (warning,) = built.warnings
    assert f"another daemon uses the persistence folder {kept}" in warning
    assert [path.name for path in kept.iterdir()] == ["kvd.held"]


def test_without_a_server_there_is_one_warning_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_config.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", "")
    built = build(tmp_path, Tiers())
    assert built.stack is None
    (warning,) = built.warnings
    assert "pip install 'kvd-daemon[embedded]'" in warning
    with pytest.raises(TierUnavailable):
        check_tiers(Tiers(), {})


@pytest.mark.parametrize(
    ("redis", "words"),
    [
        (RedisTier(url="http://host"), "must begin with one of unix://"),
        (RedisTier(url="redis://"), "needs a host"),
        (RedisTier(url="redis://:hunter2@host:port"), "port from 1 to 65535"),
        (RedisTier(url="redis://user:hunter2@one,two"), "several hosts"),
        (RedisTier(url="redis://host?passwort=hunter2"), "unknown option 'passwort'"),
        (RedisTier(url="redis://host", password_file="/nonexistent"), "password file /nonexistent"),
        (RedisTier(url="redis://host", password_env="NOT_THERE"), "$NOT_THERE"),
    ],
)
def test_a_wrong_address_is_one_warning_without_its_secret(tmp_path, redis, words):
    built = build(tmp_path, Tiers(redis=redis))
    assert built.stack is None
    (warning,) = built.warnings
    assert words in warning
    assert "hunter2" not in warning
    assert "\n" not in warning
    with pytest.raises(ConfigError):
        check_tiers(Tiers(redis=redis), {})


def test_the_sections_password_beats_the_urls(tmp_path):
    (secret := tmp_path / "secret").write_text("hunter2\n")
    redis = RedisTier(url="redis://user:other@host?db=1", password_file=str(secret))
    built = build_tiers(
        Tiers(redis=redis), SIZES, runtime_dir=tmp_path, available_nbytes=GIB, environ={"KVD_REDIS_PASSWORD": "third"}
    )
    assert built.stack is not None
    (tier,) = built.stack.tiers
    assert tier._address.password.reveal() == "hunter2"  # type: ignore[attr-defined]
    (status,) = built.stack.statuses()
    assert status.address == "redis://user@host:6379?db=1"
    built.stack.close()


def test_a_persistence_folder_that_cannot_be_is_a_warning_and_the_server_runs_without(tmp_path):
    (tmp_path / "file").touch()
    tiers = Tiers(redis=RedisTier(persistence=str(tmp_path / "file" / "kept")))
    built = build(tmp_path, tiers)
    assert built.stack is not None
    assert not built.stack.has_lasting
    (warning,) = built.warnings
    assert "keeps nothing when the daemon stops" in warning
    with pytest.raises(KvdError):
        check_tiers(tiers, {})


def test_the_automatic_budget_leaves_room_for_the_rest_of_the_machine():
    assert auto_redis_budget_nbytes(16 * GIB, 4 * GIB) == 4 * GIB
    assert auto_redis_budget_nbytes(100 * GIB, 8 * GIB) == 8 * GIB
    assert auto_redis_budget_nbytes(1 * GIB, 2 * GIB) == 0


def test_too_little_memory_for_a_server_is_a_warning(tmp_path):
    built = build(tmp_path, Tiers(), available_nbytes=SIZES.budget_nbytes + 9 * MIB)
    assert built.stack is None
    assert "tiers.redis.budget" in built.warnings[0]
