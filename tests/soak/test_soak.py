"""Eight processes share, abort, fork and die at random for two minutes; nothing may be wrong, lost or left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvd_client
from kvd.status import Snapshot
from tests.soak.checks import check_nothing_is_left
from tests.soak.probe import Probe
from tests.soak.workers import Workers
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import running_server
from tests.support.wait import eventually

DURATION_S = float(os.environ.get("KVD_SOAK_S", "120"))


def num_descriptors_when_settled(daemon: Daemon, budget_nbytes: int) -> int:
    """With all memory made and one client: from then on the daemon needs no further descriptors for itself."""
    with kvd_client.connect(daemon.folder) as client:
        eventually(lambda: client.status().memory.ready_nbytes == budget_nbytes)
        return daemon.num_descriptors()


def check_cached_and_evicted(snapshot: Snapshot) -> None:
    """Otherwise the soak has not tried what it is for."""
    (pool,) = snapshot.pools
    assert pool.counters["hits"] > 0
    assert pool.counters["evictions"] > 0


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 120)
def test_eight_processes_with_one_killed_each_second_see_only_right_bytes_and_leave_nothing(tmp_path: Path) -> None:
    # About half of the working set fits, so that eviction runs all the time.
    with running_daemon(tmp_path, budget="8MiB", segment="1MiB", prefault="background") as daemon:
        num_descriptors = num_descriptors_when_settled(daemon, 8 << 20)
        workers = Workers(daemon.folder, num_prefixes=12)
        workers.run(DURATION_S)
        workers.stop()

        assert workers.total("verified_nbytes") > 0
        check_cached_and_evicted(check_nothing_is_left(daemon))
        with kvd_client.connect(daemon.folder):
            eventually(lambda: daemon.num_descriptors() == num_descriptors, timeout_s=5)


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 120)
def test_the_same_over_three_tiers_while_redis_freezes_and_dies(tmp_path: Path) -> None:
    # 120 prefixes of up to 24 blocks of 16 KiB are a working set of about 45 MiB: a quarter of it is the pool, half the
    # host tier, and Redis has room for all.
    with running_server() as server:
        tiers = {"host": {"budget": 22 << 20}, "redis": {"url": server.url}}
        with running_daemon(tmp_path, budget="11MiB", segment="1MiB", prefault="background", tiers=tiers) as daemon:
            with Probe(daemon.folder, daemon.pid) as probe:
                workers = Workers(daemon.folder, num_prefixes=120)
                freeze_s, kill_s = DURATION_S * 0.3, DURATION_S * 0.6
                due = [(freeze_s, server.freeze), (freeze_s + 5, server.thaw), (kill_s, server.kill)]
                due.append((kill_s + 1, lambda: void(server.start())))

                def trouble(elapsed_s: float) -> None:
                    while due and elapsed_s >= due[0][0]:
                        due.pop(0)[1]()
                    probe.measure()

                workers.run(DURATION_S, trouble)
                workers.stop()

            assert not due
            assert workers.total("verified_nbytes") > 0
            snapshot = check_nothing_is_left(daemon)
            check_cached_and_evicted(snapshot)
            host, redis = snapshot.tiers
            assert host.num_hits > 0
            assert redis.num_puts > 0
            assert redis.errors
            with server.client() as client:
                # It was restarted empty, so what it holds was spilled after its death: that resumed by itself.
                assert client.dbsize() > 0
            # Redis was frozen for five seconds; whoever waited for it would have been late by most of them.
            late_s = probe.late_s()
            assert len(late_s) <= 1
            assert sum(late_s) < 0.5


def void(_value: object) -> None:
    """For a callable whose answer nobody wants."""
