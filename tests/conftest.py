"""What every test relies on."""

from __future__ import annotations

import signal

# Started in the background, a shell has its children ignore SIGINT, and theirs in turn: tests send it to processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
