"""What every test relies on."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Started in the background, a shell has its children ignore SIGINT, and theirs in turn: tests send it to processes.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    """An empty folder for all tests of a file, whose path leaves room for a socket's in a folder of a folder."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        yield Path(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one worker runs a whole file, which keeps its fixtures.

    The longest come first, so that no worker is left alone with one at the end.
    """
    for item in items:
        if _is_on_card(item):
            item.add_marker(pytest.mark.card)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("soak") is None)


def _is_on_card(item: pytest.Item) -> bool:
    """Whether it runs over the fake driver: the second run of a test of host memory, or a test of cards alone."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_second = any(params.get(name) == "card" for name in ("home", "either_home"))
    return is_second or item.path.parent.name == "cuda" or item.path.name.startswith("test_device_")
