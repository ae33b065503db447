"""A client that waits briefly for its daemon, from a moment on: until then a busy machine may take its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import kvd_client
import kvd_client.aio


@contextmanager
def gives_up_after(seconds: float, client: kvd_client.Client | kvd_client.aio.Client) -> Iterator[None]:
    """For the block, the client's `timeout_s` is this."""
    runner = client._runner
    before, runner._options = runner._options, replace(runner._options, timeout_s=seconds)
    try:
        yield
    finally:
        runner._options = before
