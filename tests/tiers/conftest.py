"""Real servers, shared where a test does not harm them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from kvd.tiers.redis_tier import RedisOptions, RedisTier
from kvd.tiers.redis_url import parse_redis_url
from tests.support.clock import FakeClock
from tests.support.redis_servers import DEBIAN_REDIS, VALKEY, RealServer, running_cluster, running_server

_prefixes = (f"test{number}:" for number in itertools.count())

ConnectTier = Callable[..., RedisTier]


@pytest.fixture(scope="session")
def debian_redis() -> Iterator[RealServer]:
    with running_server(DEBIAN_REDIS) as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[RealServer]:
    with running_server(VALKEY) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[list[RealServer]]:
    with running_cluster() as servers:
        yield servers


@pytest.fixture
def server() -> Iterator[RealServer]:
    """A server of this test's own, to be harmed."""
    with running_server(DEBIAN_REDIS) as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def connect_tier(clock: FakeClock) -> Iterator[ConnectTier]:
    """Tiers under one prefix of this test's own, on the fake clock; closed at the end."""
    prefix = next(_prefixes)
    tiers: list[RedisTier] = []

    def connect(url: str, **options: object) -> RedisTier:
        bounds = {"control_timeout_s": 1.0, "connect_timeout_s": 1.0, "bulk_timeout_s": 5.0}
        options = {"prefix": prefix} | bounds | options
        tier = RedisTier(parse_redis_url(url, {}), RedisOptions(**options), clock=clock)
        tiers.append(tier)
        return tier

    yield connect
    for tier in tiers:
        tier.close()
