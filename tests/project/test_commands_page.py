"""COMMANDS.md has an example of every command, and what it says they print is what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.cli.app import COMMANDS
from tests.support.commands_page import PAGE, examples, is_run, sandbox, steady

EXAMPLES = examples(PAGE.read_text())
RECORD = "run: .venv/bin/python -m tests.support.commands_page"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command):
    found = [output for line, output in EXAMPLES if line.split()[:2] == ["kvd", command]]
    assert found, f"add '$ kvd {command}' in a console block to COMMANDS.md, then {RECORD}"
    assert all(found), RECORD


@pytest.fixture(scope="module")
def printed(short_path: Path) -> list[str]:
    """What each example prints, run in the page's order."""
    with sandbox(short_path) as box:
        return [box.output(command) if is_run(command) else "" for command, _ in EXAMPLES]


@pytest.mark.parametrize("at", range(len(EXAMPLES)), ids=[command for command, _ in EXAMPLES])
def test_examples_print_what_the_page_says(printed, at):
    command, documented = EXAMPLES[at]
    if is_run(command):
        assert steady(printed[at]) == steady(documented), RECORD
