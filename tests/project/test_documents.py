"""Lists in documents equal the lists in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvd
from kvd import errors
from kvd.cli.app import COMMANDS, app
from kvd.config.keys import KEYS
from kvd.config.reference import markdown

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_the_schema():
    page = (ROOT / "CONFIG.md").read_text()
    assert page == markdown(), "run: .venv/bin/python -m kvd.config.reference > CONFIG.md"


def test_the_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(kvd.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_package_has_this_version():
    assert f'\nversion = "{kvd.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command):
    assert f"kvd {command}" in (ROOT / "README.md").read_text()


def test_every_exit_code_is_in_the_help():
    documented = set(map(int, re.findall(r"\b(\d+) ", str(app.help).partition("Exit codes:")[2])))
    codes = {kind.exit_code for kind in errors.BY_CODE.values()}
    assert codes <= documented


def test_every_error_is_in_the_tree_of_the_module():
    for kind in errors.BY_CODE.values():
        assert kind.__name__ in str(errors.__doc__)


def test_error_codes_are_distinct():
    def count(kind: type[errors.KvdError]) -> int:
        return 1 + sum(map(count, kind.__subclasses__()))

    assert len(errors.BY_CODE) == count(errors.KvdError)


def test_every_limit_is_in_the_threat_model():
    page = (ROOT / "SECURITY.md").read_text()
    assert [name for name in KEYS if name.startswith("limits.") and f"`{name}`" not in page] == []
