"""The metrics keep the ecosystem's naming rules, their text parses, and the documents name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace as with_fields
from prometheus_client.parser import text_string_to_metric_families

from kvd.metrics import METRICS
from kvd.metrics.exposition import AGE, exposition
from kvd.metrics.reference import markdown
from tests.cli.snapshots import EMPTY, FULL, HOST_TIER, MOVER, PIN, REDIS_TIER, SAVINGS, WAIT
from tests.metrics.grafana import dashboard

ROOT = Path(__file__).parents[2]
NAMES = {metric.name for metric in METRICS} | {AGE}
SNAPSHOT = with_fields(
    FULL,
    tiers=[HOST_TIER, REDIS_TIER],
    mover=with_fields(MOVER, counters={"spilled": 3, "spilled_nbytes": 9}),
    savings=SAVINGS,
    pins=[PIN],
    waits=[WAIT],
)
BASE_UNITS = ("seconds", "bytes", "blocks", "tokens")
FORBIDDEN_UNITS = ("milliseconds", "_ms", "kilobytes", "megabytes", "_mb", "_kb", "_kib", "_mib", "nbytes", "percent")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric):  # prometheus.io/docs/practices/naming, and what promtool checks
    assert re.fullmatch(r"kvd(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert not any(unit in metric.name for unit in FORBIDDEN_UNITS)
    assert not re.search(r"_(counter|gauge|histogram|summary)\b|_(count|sum|bucket)$", metric.name)
    for label in metric.labels:
        assert re.fullmatch(r"[a-z][a-z_]*", label)
        assert label not in {"le", "quantile", "job", "instance"}
        assert label not in metric.name.split("_") or label in {"pool", "tier"}
    assert metric.help.endswith(".")
    unit = metric.name.removesuffix("_total").rsplit("_", 1)[-1]
    assert unit in BASE_UNITS or metric.kind == "counter" or unit[-1] == "s" or unit in {"info", "up", "stalled"}


def test_names_are_distinct():
    assert len(NAMES) == len(METRICS) + 1


def test_the_text_parses_and_every_metric_is_in_it():
    text = exposition(SNAPSHOT, 0.25).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {sample.name for family in families.values() for sample in family.samples}
    assert found == NAMES
    for family in families.values():
        assert family.documentation
        assert family.type in {"counter", "gauge"}
        keys = [(sample.name, *sorted(sample.labels.items())) for sample in family.samples]
        assert len(keys) == len(set(keys)), "a sample is there once"


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"no {name} {labels}")


def test_figures_are_the_snapshots():
    text = exposition(SNAPSHOT, 0.25).decode()
    assert value(text, "kvd_pool_blocks", pool="0", state="idle") == 4744
    assert value(text, "kvd_pool_blocks", pool="0", state="referenced") == 256
    assert value(text, "kvd_evicted_blocks_total", pool="0", copied="yes") == 12_345
    assert value(text, "kvd_tier_up", tier="host") == 1
    assert value(text, "kvd_tier_up", tier="redis") == 0
    assert value(text, "kvd_tier_errors_total", tier="redis", cause="refused") == 1200
    assert value(text, "kvd_tier_read_bytes_total", tier="host") == 2 << 30
    assert value(text, "kvd_saved_tokens_total") == 204_800
    assert value(text, "kvd_saved_prefill_seconds") == 320.0
    assert value(text, "kvd_waiting_requests") == 1
    assert value(text, "kvd_mover_events_total", event="spilled") == 3
    assert value(text, AGE) == 0.25


def test_a_daemon_nobody_uses_has_figures_too():
    assert value(exposition(EMPTY, 0).decode(), "kvd_sessions") == 0


def test_nothing_names_a_user_a_model_or_a_process():
    text = exposition(SNAPSHOT, 0).decode()
    for private in ("group:kvd", "smollm2", "reader", "12345", "1000", "manual", "c0ffee", "/run/"):
        assert not re.search(rf'="[^"]*{re.escape(private)}', text), private


def test_the_page_is_the_table():
    assert (ROOT / "METRICS.md").read_text() == markdown(), (
        "run: .venv/bin/python -m kvd.metrics.reference > METRICS.md"
    )


def test_the_dashboard_is_what_its_source_makes_and_names_only_what_there_is():
    made = json.loads((ROOT / "docs/grafana.json").read_text())
    assert made == dashboard(), "run: .venv/bin/python -m tests.metrics.grafana > docs/grafana.json"
    labels = {metric.name: set(metric.labels) for metric in METRICS} | {AGE: set()}
    for panel in made["panels"]:
        for target in panel["targets"]:
            used = set(re.findall(r"\bkvd_\w+", target["expr"]))
            assert used
            assert used <= NAMES
            for name, matchers in re.findall(r"(kvd_\w+)\{([^}]*)\}", target["expr"]):
                assert set(re.findall(r"(\w+)\s*=", matchers)) <= labels[name]
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            for name in {one.strip() for group in grouped for one in group.split(",")}:
                assert all(name in labels[metric] for metric in used)
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set.union(
                *(labels[one] for one in used)
            )
            for name in used:
                assert ("rate(" in target["expr"]) or not name.endswith("_total")


def test_the_dashboard_has_what_grafana_needs_to_load_it():
    made = json.loads((ROOT / "docs/grafana.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(made)
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    for panel in made["panels"]:
        assert {"id", "title", "type", "gridPos", "targets", "datasource"} <= set(panel)
        assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(places) == len(set(places))
