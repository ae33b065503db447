"""What answers at the address is not a Redis that kvd can use: one line that says so, and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvd.errors import TierRefused, TierUnavailable
from tests.support.puppet_server import always, claiming, puppet_server
from tests.tiers.conformance import new_namespace
from tests.tiers.conftest import ConnectTier

PATIENCE_S = 30.0
"""Whatever answers at all does so sooner, however busy the machine."""


@pytest.mark.parametrize(
    ("answer", "cause", "says"),
    [
        (always(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "not-redis", "not a Redis"),
        (always(b"\x15\x03\x01\x00\x02\x02\x28"), "not-redis", "not a Redis"),
        (claiming("# Server\r\nnothing:here\r\n"), "not-redis", "not a Redis"),
        (claiming("# Server\r\nredis_version:5.0.14\r\nredis_mode:standalone\r\n"), "too-old", "5.0.14; kvd needs 6.2"),
        (claiming("# Server\r\nredis_version:7.2.4\r\nredis_mode:cluster\r\n"), "wrong-mode", "redis+cluster://"),
    ],
)
def test_an_impostor_is_refused(connect_tier: ConnectTier, answer: Callable[[bytes], bytes], cause: str, says: str):
    with puppet_server(answer) as url:
        tier = connect_tier(url, control_timeout_s=PATIENCE_S)
        with pytest.raises(TierRefused) as caught:
            tier.generation(new_namespace())
        assert (caught.value.cause, "\n" in str(caught.value)) == (cause, False)
        assert says in str(caught.value)
        assert tier.status().state == "down"
        assert tier.status().errors == {cause: 1}


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (always(b"-LOADING Redis is loading the dataset in memory\r\n"), "loading"),
        (always(b"-MASTERDOWN Link with MASTER is down\r\n"), "master-down"),
        (None, "timeout"),
    ],
)
def test_a_server_that_is_not_ready_is_asked_again_later(
    connect_tier: ConnectTier, answer: Callable[[bytes], bytes] | None, cause: str
):
    with puppet_server(answer) as url:
        tier = connect_tier(url, control_timeout_s=0.05 if answer is None else PATIENCE_S)
        started_s = time.monotonic()
        with pytest.raises(TierUnavailable) as caught:
            tier.generation(new_namespace())
        assert caught.value.cause == cause
        assert not isinstance(caught.value, TierRefused)
        assert time.monotonic() - started_s < 3
