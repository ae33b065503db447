"""METRICS.md, made from the table: `python -m kvd.metrics.reference > METRICS.md`."""

from __future__ import annotations

from kvd.metrics.table import METRICS

_HEAD = """\
# Metrics

Off unless asked for: `metrics.listen = "127.0.0.1:9464"` (or `[::1]:PORT`, or `unix:///run/kvd/metrics.sock`, with the
mode and group of the daemon's sockets) serves `/metrics` in Prometheus' text format; `pip install kvd-daemon[metrics]`.
Other machines cannot reach it. Nothing in it names a user, a model or a process. docs/grafana.json is a dashboard.

```yaml
scrape_configs:
  - job_name: kvd
    static_configs: [{targets: ["127.0.0.1:9464"]}]
```

Counters count up from the daemon's start. `pool` is the number that `kvd pools` shows. `kvd_snapshot_age_seconds` is
how old the figures are; more than a few seconds means that the daemon's loop hangs.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def markdown() -> str:
    """The page, ending in a newline."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels) or '-'} | {metric.help} |\n"
        for metric in METRICS
    ]
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    print(markdown(), end="")
