"""`kvd config`, `kvd completion`, help and versions, by click's runner; errors by their line and exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import kvd
from kvd.cli.app import COMMANDS, app
from kvd.config.keys import KEYS
from kvd.config.load import load


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY", *(key.env for key in KEYS.values())):
        monkeypatch.delenv(name, raising=False)
    return lambda *args: CliRunner().invoke(app, args, prog_name="kvd")


def test_what_is_shown_is_a_file_of_the_same_configuration(run, tmp_path):
    shown = run("config", "show", "--memory-budget", "3GiB", "--memory-checksums", "--runtime-dir", '/tmp/a"b\\é')
    assert shown.exit_code == 0
    path = tmp_path / "shown.toml"
    path.write_text(shown.stdout)
    again = load(path, {})
    assert again.config.memory.budget == 3 << 30
    assert again.config.memory.checksums is True
    assert again.config.runtime_dir == '/tmp/a"b\\é'
    assert 'budget = "3GiB"' in shown.stdout
    assert "# flag --memory-budget" in shown.stdout


def test_show_json_has_every_key(run):
    values = json.loads(run("config", "show", "--json", "--limits-credits", "3").stdout)
    assert list(values) == [*KEYS, "pools"]
    assert values["pools"] == {"value": [], "origin": "default"}
    assert values["limits.credits"] == {"value": 3, "origin": "flag --limits-credits"}


def test_the_personal_file_is_found(run, tmp_path):
    path = tmp_path / ".config" / "kvd" / "kvd.toml"
    path.parent.mkdir(parents=True)
    path.write_text("[limits]\ncredits = 5\n")
    assert re.search(rf"^credits = 5 +# file {path}$", run("config", "show").stdout, re.MULTILINE)
    assert run("config", "check").stdout == f"{path}: right, 1 of {len(KEYS)} keys set\n"


def test_pool_rules_are_shown_as_they_were_written(run, tmp_path):
    path = tmp_path / "kvd.toml"
    path.write_text(
        '[tiers]\nspill = "write_through"\n[[pools]]\nname = "a"\nmodels = ["x\\u007f*", "y"]\nusers = ["root", 7]\n'
        'after_promote = "drop"\n[[pools]]\nname = "rest"\n'
    )
    shown = run("config", "show", "--config", str(path))
    (again := tmp_path / "shown.toml").write_text(shown.stdout)
    assert load(again, {}).config == load(path, {}).config
    values = json.loads(run("config", "show", "--json", "--config", str(path)).stdout)
    assert values["pools"]["value"][1] == {"name": "rest"}
    assert values["pools"]["origin"] == f"file {path}"
    check = run("config", "check", "--config", str(path)).stdout
    assert check == f"{path}: right, 1 of {len(KEYS)} keys set, 2 pool rules\n"


def test_check_without_a_file(run):
    assert run("config", "check").stdout == f"no configuration file: right, 0 of {len(KEYS)} keys set\n"


def test_a_wrong_configuration_is_one_line_and_its_exit_code(run, tmp_path):
    path = tmp_path / "kvd.toml"
    path.write_text("[memory]\nbugdet = 1\n")
    result = run("config", "check", "--config", str(path))
    assert result.exit_code == 7
    assert result.stdout == ""
    assert result.stderr == f"kvd: unknown key memory.bugdet in {path}; did you mean memory.budget?\n"


def test_an_ignored_variable_is_named(run, monkeypatch):
    monkeypatch.setenv("KVD_SERVICE_HOST", "10.0.0.1")
    result = run("config", "check")
    assert result.exit_code == 0
    assert "KVD_SERVICE_HOST" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run, shell):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_KVD_COMPLETE" in result.stdout


def test_completion_offers_choices(run, monkeypatch):
    monkeypatch.setenv("_KVD_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "kvd config show --memory-prefault ")
    monkeypatch.setenv("COMP_CWORD", "4")
    result = CliRunner().invoke(app, [], prog_name="kvd", complete_var="_KVD_COMPLETE", standalone_mode=True)
    assert "lazy" in result.stdout


def test_version(run):
    assert run("--version").stdout == f"kvd, version {kvd.__version__}\n"


def test_an_unknown_command_is_a_usage_error(run):
    result = run("sreve")
    assert result.exit_code == 2
    assert "sreve" in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_the_group_says_the_same(run, name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert COMMANDS[name].summary in result.stdout.replace("\n  ", "\n")
    assert COMMANDS[name].summary in run("--help").stdout


def _commands(command, path=()):
    yield path, command
    for name in getattr(command, "commands", {}):
        yield from _commands(command.commands[name], (*path, name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name):
    for _path, command in _commands(app.get_command(None, name)):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, parameter.name


def test_the_script_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "kvd.cli", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert kvd.__version__ in done.stdout


def test_a_password_is_never_shown(run):
    url = "redis://user:hunter2@host:6379"
    shown = run("config", "show", "--tiers-redis-url", url).stdout
    assert 'url = "redis://user:***@host:6379"' in shown
    assert "password not shown" in shown
    values = json.loads(run("config", "show", "--json", "--tiers-redis-url", url).stdout)
    assert values["tiers.redis.url"]["value"] == "redis://user:***@host:6379"
    assert "hunter2" not in shown


def test_check_reads_the_url_that_serve_would_only_warn_of(run):
    result = run("config", "check", "--tiers-redis-url", "http://:hunter2@host")
    assert result.exit_code == 7
    assert "unix://" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hunter2" not in result.stderr
