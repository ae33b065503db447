"""Makes docs/grafana.json: .venv/bin/python -m tests.metrics.grafana > docs/grafana.json"""

from __future__ import annotations

import json
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANELS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Hit rate", "timeseries", "percentunit", (
        ('sum(rate(kvd_lookup_blocks_total{result="hit"}[$__rate_interval])) '
         "/ sum(rate(kvd_lookup_blocks_total[$__rate_interval]))", "in memory"),
        ("sum by (tier) (rate(kvd_tier_found_blocks_total[$__rate_interval])) "
         "/ sum by (tier) (rate(kvd_tier_asked_blocks_total[$__rate_interval]))", "{{tier}}"),
    )),
    ("Tokens saved", "timeseries", "short", (("sum(rate(kvd_saved_tokens_total[$__rate_interval]))", "tokens/s"),)),
    ("Prefill saved", "stat", "s", (("kvd_saved_prefill_seconds", "since the start"),)),
    ("Memory", "timeseries", "bytes", (
        ("kvd_memory_used_bytes", "in pools ({{device}})"),
        ("kvd_memory_ready_bytes", "ready ({{device}})"),
        ("kvd_memory_budget_bytes", "budget ({{device}})"),
    )),
    ("Blocks by state", "timeseries", "short", (("sum by (state) (kvd_pool_blocks)", "{{state}}"),)),
    ("Evicted blocks", "timeseries", "short", (
        ("sum by (copied) (rate(kvd_evicted_blocks_total[$__rate_interval]))", "copy below: {{copied}}"),
    )),
    ("Tier flow", "timeseries", "Bps", (
        ("sum by (tier) (rate(kvd_tier_read_bytes_total[$__rate_interval]))", "{{tier}} up"),
        ("sum by (tier) (rate(kvd_tier_written_bytes_total[$__rate_interval]))", "{{tier}} down"),
    )),
    ("Tiers", "stat", "short", (("kvd_tier_up", "{{tier}}"),)),
    ("Tier errors", "timeseries", "short", (
        ("sum by (tier, cause) (rate(kvd_tier_errors_total[$__rate_interval]))", "{{tier}}: {{cause}}"),
    )),
    ("Sessions", "timeseries", "short", (
        ("kvd_sessions", "connected"), ("kvd_sessions_stalled", "stalled"), ("kvd_waiting_requests", "waiting"),
    )),
    ("Requests", "timeseries", "reqps", (
        ('rate(kvd_server_events_total{event="requests"}[$__rate_interval])', "requests"),
    )),
    ("Copies", "timeseries", "short", (("sum by (rank, state) (kvd_mover_jobs)", "{{rank}} {{state}}"),)),
    ("Warnings, and age of the figures", "timeseries", "short", (
        ("kvd_warnings", "warnings"), ("kvd_snapshot_age_seconds", "age in seconds"),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Twelve columns wide panels, two a row."""
    panels = []
    for number, (title, kind, unit, targets) in enumerate(PANELS):
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": kind,
                "datasource": SOURCE,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
                    for at, (expr, legend) in enumerate(targets)
                ],
            }
        )
    return {
        "title": "kvd",
        "uid": "kvd",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "tags": ["kvd"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
