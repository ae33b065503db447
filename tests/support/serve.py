"""Runs `kvd.daemon.serve` with the configuration in argv[1] (JSON), in a process of its own."""

from __future__ import annotations

import importlib
import os
import sys

import msgspec

from kvd.config.schema import Config
from kvd.daemon import serve

if __name__ == "__main__":
    if os.geteuid() != 0:
        # Tests count the daemon's descriptors and mappings, which only root may see of one that is not dumpable.
        importlib.import_module("kvd.daemon.serve").keep_memory_private = lambda: None  # type: ignore[attr-defined]
    sys.exit(serve(msgspec.json.decode(sys.argv[1], type=Config)))
