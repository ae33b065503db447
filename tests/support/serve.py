"""Runs `kvd.daemon.serve` with the configuration in argv[1] (JSON), in a process of its own.

With $PATIENCE_WITH_REDIS_S it waits so long for any answer of a Redis, where 50 ms are the rule: a busy machine may
take longer, and a test that is not about that would find a tier in trouble.
"""

from __future__ import annotations

import importlib
import os
import sys

import msgspec

from kvd.config.schema import Config
from kvd.daemon import serve

if __name__ == "__main__":
    if patience_s := os.environ.get("PATIENCE_WITH_REDIS_S"):
        defaults = importlib.import_module("kvd.tiers.redis_options").RedisOptions.__init__.__kwdefaults__
        for name in ("control_timeout_s", "connect_timeout_s", "bulk_timeout_s"):
            defaults[name] = float(patience_s)
    if os.geteuid() != 0:
        # Tests count the daemon's descriptors and mappings, which only root may see of one that is not dumpable.
        importlib.import_module("kvd.daemon.serve").keep_memory_private = lambda: None  # type: ignore[attr-defined]
    sys.exit(serve(msgspec.json.decode(sys.argv[1], type=Config)))
