"""Which runtime folder, which configuration file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.config.paths import DAEMON_MARK, SYSTEM_RUNTIME_DIR, config_file, find_runtime_dir, runtime_dir
from kvd.errors import ConfigError
from kvd.protocol.session import SESSION_SOCKET
from tests.support.unprivileged import as_nobody

ALL = {"KVD_RUNTIME_DIR": "/a", "RUNTIME_DIRECTORY": "/b:/b2", "XDG_RUNTIME_DIR": "/c"}


def test_the_mark_is_the_session_socket():
    assert DAEMON_MARK == SESSION_SOCKET


def test_the_order_of_the_folders():
    assert runtime_dir("/x", ALL) == Path("/x")
    assert runtime_dir(None, ALL) == Path("/a")
    del (environ := dict(ALL))["KVD_RUNTIME_DIR"]
    assert runtime_dir(None, environ) == Path("/b")
    del environ["RUNTIME_DIRECTORY"]
    assert runtime_dir(None, environ) == Path("/c/kvd")
    assert runtime_dir(None, {}) == SYSTEM_RUNTIME_DIR


def test_a_relative_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runtime_dir("here", {}) == tmp_path / "here"


def test_a_client_takes_the_folder_where_a_daemon_is(tmp_path):
    service, login = tmp_path / "service", tmp_path / "login"
    environ = {"RUNTIME_DIRECTORY": str(service), "XDG_RUNTIME_DIR": str(login)}
    assert find_runtime_dir(None, environ) == service
    (login / "kvd").mkdir(parents=True)
    (login / "kvd" / SESSION_SOCKET).touch()
    assert find_runtime_dir(None, environ) == login / "kvd"


def test_a_folder_that_is_named_is_the_only_one(tmp_path):
    (tmp_path / "kvd").mkdir()
    (tmp_path / "kvd" / SESSION_SOCKET).touch()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "KVD_RUNTIME_DIR": "/named"}
    assert find_runtime_dir(None, environ) == Path("/named")
    assert find_runtime_dir("/given", environ) == Path("/given")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="kvd-paths-") as name:
        (place := Path(name)).chmod(0o755)
        yield place


def closed(folder: Path) -> Path:
    """The folder with a socket in it, and nobody may enter."""
    folder.mkdir(parents=True)
    (folder / SESSION_SOCKET).touch()
    folder.chmod(0)
    return folder


def test_a_folder_that_may_not_be_entered_is_passed_over_for_one_with_a_daemon(place):
    service, login = closed(place / "service"), place / "login"
    (login / "kvd").mkdir(parents=True)
    (login / "kvd" / SESSION_SOCKET).touch()
    environ = {"RUNTIME_DIRECTORY": str(service), "XDG_RUNTIME_DIR": str(login)}
    assert as_nobody(lambda: find_runtime_dir(None, environ) == login / "kvd")


def test_without_a_daemon_elsewhere_the_folder_that_may_not_be_entered_is_it(place):
    environ = {"RUNTIME_DIRECTORY": str(place / "absent"), "XDG_RUNTIME_DIR": str(place)}
    hidden = closed(place / "kvd")
    assert as_nobody(lambda: find_runtime_dir(None, environ) == hidden)


def test_a_named_folder_is_not_looked_into(place):
    hidden = closed(place / "hidden")
    assert as_nobody(lambda: find_runtime_dir(hidden / "below", {}) == hidden / "below")


def test_an_empty_name_is_no_folder():
    with pytest.raises(ConfigError, match="empty"):
        find_runtime_dir("", {})
    with pytest.raises(ConfigError, match="empty"):
        runtime_dir("", {})


def test_a_configuration_file_that_may_not_be_looked_for_is_not_passed_over(place):
    folder = closed(place / "kvd")
    assert as_nobody(lambda: config_file(None, {"XDG_CONFIG_HOME": str(place)}) == folder / "kvd.toml")


def test_a_folder_too_long_for_a_socket_is_refused():
    assert runtime_dir("/" + "x" * 92, {})
    with pytest.raises(ConfigError, match="shorter"):
        runtime_dir("/" + "x" * 93, {})


def test_the_configuration_file(tmp_path):
    home = {"HOME": str(tmp_path)}
    personal = tmp_path / ".config" / "kvd" / "kvd.toml"
    personal.parent.mkdir(parents=True)
    personal.touch()
    assert config_file(None, home) == personal
    assert config_file(None, {**home, "KVD_CONFIG": "/absent.toml"}) == Path("/absent.toml")
    assert config_file("/given.toml", {**home, "KVD_CONFIG": "/absent.toml"}) == Path("/given.toml")
    assert config_file(None, {"XDG_CONFIG_HOME": str(tmp_path / ".config")}) == personal
