"""`kvd status --watch` in a process that interrupts itself after the first snapshot."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from kvd.cli.app import app

status_module = importlib.import_module("kvd.cli.status")
render = status_module.as_json_line


def rendered_and_interrupted(*args: object) -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return render(*args)


status_module.as_json_line = rendered_and_interrupted
app(["status", "--runtime-dir", sys.argv[1], "--watch", "--json"], prog_name="kvd")
