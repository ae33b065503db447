"""Targets, medians, the choice of rows, and how rows are shown."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import kvd.bench
from kvd.bench import catalogue
from kvd.bench.row import CannotMeasure, Group, Run, Target, interleaved
from kvd.cli.app import app
from kvd.cli.render_bench import figure, render_rows
from kvd.errors import InvalidRequest

AT_MOST = Target(name="slow", unit="us", text="<= 3x a round trip", at_most=3)
AT_LEAST = Target(name="fast", unit="GiB/s", text=">= 0.9x memcpy", at_least=0.9)


@pytest.mark.parametrize(
    ("target", "value", "limit", "ratio", "ok"),
    [
        (AT_MOST, 90, 30, 3, True),
        (AT_MOST, 91, 30, 91 / 30, False),
        (AT_LEAST, 9, 10, 0.9, True),
        (AT_LEAST, 8, 10, 0.8, False),
    ],
)
def test_a_target_bounds_the_ratio(target, value, limit, ratio, ok):
    row = target.row(value, limit)
    assert (row.ratio, row.ok) == (ratio, ok)


def test_without_a_limit_a_target_bounds_the_value():
    assert Target(name="a", unit="s", text="< 2 s", at_most=2).row(1.9).ok
    assert not Target(name="a", unit="s", text="< 2 s", at_most=2).row(2.1).ok


def test_measures_take_turns_after_a_warm_up_and_give_medians():
    order: list[str] = []
    values = {"a": iter([100.0, 1, 5, 3]), "b": iter([100.0, 2, 2, 8])}

    def take(name):
        order.append(name)
        return next(values[name])

    medians = interleaved(Run(rounds=3), {"a": lambda: take("a"), "b": lambda: take("b")})
    assert medians == {"a": 3, "b": 2}
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]


def test_a_group_that_cannot_run_says_why_and_the_others_go_on():
    def fails(_run):
        raise CannotMeasure("needs torch")

    groups = [Group((AT_MOST,), fails), Group((AT_LEAST,), lambda _run: [AT_LEAST.row(1, 1)])]
    rows = list(catalogue.measure(groups, Run(), lambda _group: None))
    assert [(row.name, row.ok, row.note) for row in rows] == [("slow", None, "needs torch"), ("fast", True, "")]


def test_a_row_brings_those_measured_with_it():
    (group,) = catalogue.chosen(["l1_get"])
    assert [target.name for target in group.targets] == ["begin_256_blocks", "l1_get"]
    assert catalogue.chosen([]) == list(catalogue.GROUPS)


def test_the_engines_rows_are_asked_for():
    names = [target.name for group in catalogue.chosen([], engines=True) for target in group.targets]
    assert {"ttft_2048_cached", "contiguous_update", "llama_server_ttft_1500"} <= set(names)
    (group,) = catalogue.chosen(["contiguous_update"])
    assert group not in catalogue.chosen([])


def test_an_unknown_row_names_the_nearest():
    with pytest.raises(InvalidRequest, match="did you mean chain_hash_4096"):
        catalogue.chosen(["chain_hash"])


def test_every_row_is_defined_in_its_modules_docstring():
    for path in Path(kvd.bench.__file__).parent.glob("*.py"):
        source = path.read_text()
        names = [name for name in catalogue.NAMES if f'name="{name}"' in source]
        docstring = ast.get_docstring(ast.parse(source)) or ""
        for name in names:
            assert f"{name}. " in docstring or docstring.startswith(f"{name}.") or f"{name}: " in docstring, (
                path.name,
                name,
            )


GOLDEN = """\
row   value      limit  ratio          target
slow      91 us     30  3.03x  missed  <= 3x a round trip
fast  9 GiB/s       10   0.9x  ok      >= 0.9x memcpy
slow          -      -      -  -       <= 3x a round trip

slow: needs torch
"""


def test_the_table():
    out = io.StringIO()
    rows = [AT_MOST.row(91, 30), AT_LEAST.row(9, 10), AT_MOST.missing("needs torch")]
    Console(file=out, width=80, no_color=True).print(render_rows(rows))
    text = "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())
    assert text.split() == GOLDEN.split()
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.01234, "0.0123"), (3, "3"), (99.96, "100"), (12345.6, "12,346")]
)
def test_figures(value, text):
    assert figure(value) == text


def test_json_of_one_real_row():
    result = CliRunner().invoke(app, ["bench", "--quick", "--json", "--only", "chain_hash_4096"])
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert {"name", "unit", "value", "limit", "ratio", "target", "ok"} <= set(row)
    assert row["name"] == "chain_hash_4096"
    assert row["ratio"] == pytest.approx(row["value"] / row["limit"])


def test_an_unknown_row_is_one_line_and_an_exit_code():
    result = CliRunner().invoke(app, ["bench", "--only", "nothing"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
