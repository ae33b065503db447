"""How long the client waits for an answer, beside how long the daemon may take over one."""

from __future__ import annotations

import msgspec
from msgspec import inspect

from kvd.config.schema import Waits
from kvd.protocol.requests import Begin, Status
from kvd_client.core.verb import bound_s


def greatest(field: str) -> float:
    """What the configuration allows at most."""
    kind = inspect.type_info(Waits)
    assert isinstance(kind, inspect.StructType)
    (found,) = [each.type for each in kind.fields if each.name == field]
    while isinstance(found, inspect.Metadata):
        found = found.type
    assert isinstance(found, inspect.FloatType)
    assert found.le is not None
    return found.le


def test_a_begin_is_given_the_wait_it_asks_for_or_the_longest_the_daemon_may_add_and_the_callers_margin() -> None:
    begin = Begin(1, 1, 1, b"", 0, 1)
    assert bound_s(begin, 30) >= 30 + greatest("default_s")
    assert bound_s(msgspec.structs.replace(begin, wait_s=5.0), 30) == 35
    assert bound_s(Status(1, 1), 30) == 30
