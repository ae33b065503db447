"""Runs `kvd.daemon.serve` with the configuration in argv[1] (JSON), in a process of its own."""

from __future__ import annotations

import sys

import msgspec

from kvd.config.schema import Config
from kvd.daemon import serve

if __name__ == "__main__":
    sys.exit(serve(msgspec.json.decode(sys.argv[1], type=Config)))
