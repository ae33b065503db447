"""Nothing is left behind: descriptors and threads after trouble, and after many tiers."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from kvd.errors import TierUnavailable
from kvd.tiers.base import Read, Write
from kvd.tiers.embedded import EmbeddedOptions
from kvd.tiers.embedded_tier import EmbeddedRedisTier
from kvd.tiers.redis_tier import RedisOptions, RedisTier
from kvd.tiers.redis_url import parse_redis_url
from tests.support.redis_servers import RealServer
from tests.tiers.conformance import empty, new_block, new_key, new_namespace

OPTIONS = RedisOptions(control_timeout_s=1.0, bulk_timeout_s=0.2)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing itself holds one, both times


def test_a_redis_tier_in_trouble_leaks_no_descriptor(server: RealServer):
    before = descriptors()
    for _ in range(5):
        with RedisTier(parse_redis_url(server.url, {}), OPTIONS) as tier:
            namespace = new_namespace()
            keys, generation = [new_key(namespace) for _ in range(10)], tier.generation(namespace)
            tier.put_many([Write(key, new_block(), generation) for key in keys])
            server.freeze()
            tier.get_many([Read(key, empty()) for key in keys])
            with pytest.raises(TierUnavailable):
                tier.contains(keys)
            server.thaw()
            server.kill()
            tier.get_many([Read(key, empty()) for key in keys])
            server.start()
    assert descriptors() == before


def test_embedded_tiers_leave_neither_thread_nor_descriptor():
    before = descriptors(), threading.active_count()
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        for _ in range(3):
            embedded = EmbeddedOptions(runtime_dir=Path(folder), budget_nbytes=16 << 20)
            with EmbeddedRedisTier(embedded, OPTIONS) as tier:
                tier.server.wait_until_up(10)
                tier.generation(new_namespace())
    assert (descriptors(), threading.active_count()) == before
