"""What every test relies on."""

from __future__ import annotations

import signal

import pytest

# Started in the background, a shell has its children ignore SIGINT, and theirs in turn: tests send it to processes.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one worker runs a whole file, which keeps its fixtures, and all files that look at /dev/shm.

    The longest come first, so that no worker is left alone with one at the end.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("soak") is None)
