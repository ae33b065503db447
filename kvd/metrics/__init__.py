"""What a Prometheus may fetch: each metric in one table, and the endpoint that serves them off the loop.

Nothing in here names a user, a model, a process or a key: whoever may connect to a loopback port learns totals only.
"""

from kvd.metrics.address import Address, parse_address
from kvd.metrics.table import METRICS, Metric

__all__ = ["METRICS", "Address", "Metric", "parse_address"]
