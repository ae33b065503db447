"""A snapshot as Prometheus text, by prometheus-client (the `metrics` extra)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvd.metrics.table import METRICS
from kvd.status import Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
AGE = "kvd_snapshot_age_seconds"
AGE_HELP = "How old these figures are: more than a few seconds means that the daemon's loop hangs."


class SnapshotCollector(Collector):
    """One snapshot's families, as prometheus-client wants them."""

    def __init__(self, snapshot: Snapshot, age_s: float) -> None:
        self._snapshot = snapshot
        self._age_s = age_s

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Every metric of the table that has a sample, and the age."""
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.samples(self._snapshot):
                family.add_metric(list(labels), float(value))
            if family.samples:
                yield family
        yield GaugeMetricFamily(AGE, AGE_HELP, self._age_s)


def exposition(snapshot: Snapshot, age_s: float) -> bytes:
    """The text. Pure; any thread."""
    return generate_latest(SnapshotCollector(snapshot, age_s))
