"""The conformance suite over every tier, on real servers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.memory import HostSegment
from kvd.tiers.base import Tier
from kvd.tiers.embedded import EmbeddedOptions
from kvd.tiers.embedded_tier import EmbeddedRedisTier
from kvd.tiers.host import HostTier
from kvd.tiers.redis_tier import RedisOptions
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import FaultyTier
from tests.support.redis_servers import RealServer
from tests.tiers.conformance import TierConformance
from tests.tiers.conftest import ConnectTier


class TestDictTier(TierConformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return DictTier()


class TestFaultyTierWithoutFaults(TierConformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return FaultyTier(DictTier())


class TestHostTier(TierConformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with HostTier(make_segment=HostSegment, budget_nbytes=32 << 20, segment_nbytes=4 << 20) as tier:
            yield tier
            if tier.status().state == "up":
                tier.check_integrity()


class TestDebianRedis(TierConformance):
    @pytest.fixture
    def tier(self, debian_redis: RealServer, connect_tier: ConnectTier) -> Tier:
        return connect_tier(debian_redis.url)


class TestValkey(TierConformance):
    @pytest.fixture
    def tier(self, valkey: RealServer, connect_tier: ConnectTier) -> Tier:
        return connect_tier(valkey.url)


class TestRedisWithCodec(TierConformance):
    @pytest.fixture(params=["lz4", "zstd"])
    def tier(self, debian_redis: RealServer, connect_tier: ConnectTier, request: pytest.FixtureRequest) -> Tier:
        return connect_tier(debian_redis.url, codec=request.param)


class TestRedisCluster(TierConformance):
    @pytest.fixture
    def tier(self, redis_cluster: list[RealServer], connect_tier: ConnectTier) -> Tier:
        return connect_tier(redis_cluster[0].url.replace("redis://", "redis+cluster://"))


class TestEmbeddedServer(TierConformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
            embedded = EmbeddedOptions(runtime_dir=Path(folder), budget_nbytes=256 << 20)
            with EmbeddedRedisTier(embedded, RedisOptions(control_timeout_s=1.0, bulk_timeout_s=5.0)) as tier:
                tier.server.wait_until_up(10)
                yield tier
