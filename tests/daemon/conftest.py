"""A fake machine with cards for the daemons of these tests, and for the test's own process."""

from __future__ import annotations

import pytest

from tests.cuda.conftest import machine
from tests.support import daemon


@pytest.fixture(params=["host", "card"])
def either_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs twice: its daemons have their pools in host memory, then on a card.

    What is about the pools alone needs no second run: they know no memory, only block ids. Nor do tests of the service
    with a mover run by hand; what differs between the two homes is below them, in `kvd.memory` and `kvd.build`.
    """
    if request.param == "card":
        monkeypatch.setattr(daemon, "default_machine", request.getfixturevalue("machine"))


__all__ = ["machine"]
