"""Every row can be measured against a real daemon; whether a target is reached is not a test's business."""

from __future__ import annotations

import pytest

from kvd.bench import catalogue, llama_server, model, restart
from kvd.bench.row import Group, Run
from kvd.bench.start import START_GROUP

SLOW = (model.GROUP, restart.GROUP, llama_server.GROUP)
QUICK = [group for group in (*catalogue.GROUPS, *catalogue.ENGINE_GROUPS) if group not in (*SLOW, START_GROUP)]


def measured(group: Group) -> None:
    rows = group.measure(Run(rounds=1))
    assert [row.name for row in rows] == [target.name for target in group.targets]
    for row in rows:
        assert row.value is not None
        assert row.value > 0
        assert row.ok is not None


@pytest.mark.parametrize("group", QUICK, ids=lambda group: group.targets[0].name)
def test_a_group_measures_its_rows(group):
    measured(group)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", SLOW, ids=lambda group: group.targets[0].name)
def test_the_real_model_measures_its_rows(group, monkeypatch):
    # That it measures is shown by a prompt of a quarter just as well, in a tenth of the time.
    monkeypatch.setattr(model, "NUM_CACHED", model.NUM_CACHED // 4)
    monkeypatch.setattr(restart, "NUM_CACHED", restart.NUM_CACHED // 4)
    measured(group)


def test_names_are_distinct():
    assert len(set(catalogue.NAMES)) == len(catalogue.NAMES)
