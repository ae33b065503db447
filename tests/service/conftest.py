from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.harness import House


@pytest.fixture
def make_house() -> Iterator[Callable[..., House]]:
    """Makes houses; each is checked at the end, and no descriptor may be left."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    houses: list[House] = []

    def make(num_segments: int = 2, **more: object) -> House:
        houses.append(House(num_segments, **more))  # type: ignore[arg-type]
        return houses[-1]

    yield make
    for house in houses:
        house.check()
        house.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    """Two segments of four blocks."""
    return make_house()
