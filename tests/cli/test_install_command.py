"""`kvd install` and `kvd uninstall` into a folder; tests/system has them in a real systemd."""

from __future__ import annotations

import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import install as install_command
from kvd.cli import service_manager
from kvd.cli.app import app
from kvd.systemd.reference import reference_files
from kvd.systemd.units import Program, made_groups, system_files, this_program
from tests.support.daemon import ROOT
from tests.support.unprivileged import as_nobody


def run(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="kvd")


def files_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def no_manager(monkeypatch):
    """No test here may reach the systemd of the machine it runs on."""
    monkeypatch.setattr(service_manager, "run", None)
    monkeypatch.setattr(install_command, "run", None)


def test_the_folder_in_the_source_is_what_the_code_makes():
    assert files_below(ROOT / "systemd") == reference_files(), "run: python -m kvd.systemd.reference systemd"


def test_install_writes_and_uninstall_leaves_nothing(tmp_path):
    done = run("install", "--root", tmp_path)
    assert done.exit_code == 0, done.output
    assert set(files_below(tmp_path)) == {
        "etc/systemd/system/kvd.service",
        "etc/systemd/system/kvd-nvidia.service",
        "etc/sysusers.d/kvd.conf",
        "etc/tmpfiles.d/kvd.conf",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.conf")} == {0o644}
    state = tmp_path / "var/lib/kvd/redis"
    state.mkdir(parents=True)
    (state / "dump.rdb").touch()
    done = run("uninstall", "--root", tmp_path)
    assert done.exit_code == 0, done.output
    assert files_below(tmp_path) == {}
    assert not state.parent.exists()


def test_a_second_install_changes_only_what_is_another(tmp_path):
    run("install", "--root", tmp_path)
    assert run("install", "--root", tmp_path).output.count("unchanged") == 4
    done = run("install", "--root", tmp_path, "--group", "llm")
    assert f"written: {tmp_path}/etc/systemd/system/kvd.service" in done.output
    assert "Group=llm\nEnvironment=KVD_ACCESS_GROUP=llm\n" in files_below(tmp_path)["etc/systemd/system/kvd.service"]
    assert "\ng llm -\n" in files_below(tmp_path)["etc/sysusers.d/kvd.conf"]
    # One that was there before is not kvd's to make, nor to take away.
    run("install", "--root", tmp_path, "--group", "daemon")
    assert made_groups(files_below(tmp_path)["etc/sysusers.d/kvd.conf"]) == ["llm"]


def test_a_dry_run_shows_every_file_and_touches_nothing(tmp_path):
    done = run("install", "--dry-run", "--root", tmp_path)
    assert done.exit_code == 0
    for text in system_files(this_program()).values():
        assert text in done.output
    assert list(tmp_path.iterdir()) == []
    run("install", "--root", tmp_path)
    before = files_below(tmp_path)
    assert run("uninstall", "--dry-run", "--root", tmp_path).output.count("would remove") == 4
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_file_of_somebody_else_is_left_alone(tmp_path, command):
    unit = tmp_path / "etc/systemd/system/kvd.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    done = run(command, "--root", tmp_path)
    assert done.exit_code == 1
    assert str(unit) in done.stderr
    assert files_below(tmp_path) == {"etc/systemd/system/kvd.service": "[Service]\n"}


def test_a_configuration_stays_and_is_named(tmp_path):
    run("install", "--root", tmp_path)
    (own := tmp_path / "etc/kvd").mkdir()
    (own / "kvd.toml").touch()
    assert f"left, as it is yours: {own}" in run("uninstall", "--root", tmp_path).output
    assert (own / "kvd.toml").exists()


def test_what_is_kept_can_stay(tmp_path):
    (state := tmp_path / "var/lib/kvd").mkdir(parents=True)
    run("install", "--root", tmp_path)
    run("uninstall", "--root", tmp_path, "--keep-data")
    assert state.exists()


def test_only_root_installs_for_the_system():
    assert as_nobody(lambda: run("install").exit_code == 1 and run("uninstall").exit_code == 1)


def test_a_users_own_service_lies_among_the_users_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/elsewhere/config")
    done = run("install", "--user", "--dry-run")
    assert done.output.startswith("--- /elsewhere/config/systemd/user/kvd.service\n# Written by `kvd install --user`")
    assert "PrivateUsers" not in done.output
    assert "User=" not in done.output


@pytest.mark.parametrize("name", ["", "a b", "x\nExecStartPre=/bin/true", "-x", "Ü"])
def test_a_group_that_is_no_name_is_refused(tmp_path, name):
    assert run("install", "--root", tmp_path, "--group", name).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_command_in_the_unit_runs_this_kvd_from_anywhere():
    text = next(iter(system_files(this_program()).values()))
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    argv = shlex.split(line.removeprefix("ExecStart="))
    assert argv[-1] == "serve"
    done = subprocess.run([*argv[:-1], "--version"], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvd, version")


def test_folders_that_the_sandbox_hides_are_bound_and_others_are_not():
    program = Program(argv=("/home/a b/$x%/bin/python",), folders=(Path("/home/a b/$x%"), Path("/opt/kvd")))
    text = next(iter(system_files(program).values()))
    assert 'ExecStart="/home/a b/$$x%%/bin/python" serve' in text
    assert 'BindReadOnlyPaths="/home/a b/$x%%"\n' in text
    assert "ProtectHome=tmpfs" in text
    plain = next(iter(system_files(Program(argv=("/usr/bin/kvd",), folders=(Path("/usr"),))).values()))
    assert "BindReadOnlyPaths" not in plain
    assert "ProtectHome=yes" in plain
    assert "@" not in plain.replace("@system-service", "").replace("@privileged", "")


def test_a_group_that_is_not_there_is_not_named(tmp_path, monkeypatch):
    assert "\nSupplementaryGroups=video\n" in next(iter(system_files(this_program()).values()))
    monkeypatch.setattr(install_command, "GPU_GROUP", "no-such-group-here")
    run("install", "--root", tmp_path)
    assert "\nSupplementaryGroups" not in files_below(tmp_path)["etc/systemd/system/kvd.service"]


def test_a_kvd_that_others_cannot_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        install_command, "this_program", lambda: Program((sys.executable, "-m", "kvd.cli"), (tmp_path / "venv",))
    )
    (tmp_path / "venv").mkdir(mode=0o700)
    done = run("install", "--root", tmp_path / "root")
    assert done.exit_code == 1
    assert str(tmp_path / "venv") in done.stderr
    assert not (tmp_path / "root").exists()
