"""Eight processes share, abort, fork and die at random for two minutes; nothing may be wrong, lost or left."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvd_client
from tests.support.daemon import running_daemon
from tests.support.wait import eventually

NUM_WORKERS = 8
DURATION_S = float(os.environ.get("KVD_SOAK_S", "120"))


class Workers:
    """The client processes, and what they reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0
        self.processes: list[subprocess.Popen[str]] = []
        self.reports: list[dict[str, int]] = []

    def start(self) -> None:
        self.started += 1
        command = [sys.executable, "-m", "tests.soak.worker", str(self.folder), str(self.started)]
        self.processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )

    def kill_one(self, choose: random.Random) -> None:
        victim = self.processes.pop(choose.randrange(len(self.processes)))
        os.kill(victim.pid, signal.SIGKILL)
        self.collect(victim, killed=True)

    def collect(self, process: subprocess.Popen[str], *, killed: bool) -> None:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if killed else 0), output
        self.reports += [json.loads(line) for line in output.splitlines()]

    def check_alive(self) -> None:
        """A worker ends early only when it saw a wrong byte or an error it does not expect."""
        for process in self.processes:
            assert process.poll() is None, process.communicate()

    def stop(self) -> None:
        while self.processes:
            self.collect(self.processes.pop(), killed=False)


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 120)
def test_eight_processes_with_one_killed_each_second_see_only_right_bytes_and_leave_nothing(tmp_path: Path) -> None:
    choose = random.Random(20)
    # About half of the working set fits, so that eviction runs all the time.
    with running_daemon(tmp_path, budget="8MiB", segment="1MiB", prefault="background") as daemon:
        with kvd_client.connect(daemon.folder) as client:
            # All memory is made ahead, so that the descriptors counted here are all there will ever be.
            eventually(lambda: client.status().memory.ready_nbytes == 8 << 20)
            num_descriptors = daemon.num_descriptors()
        workers = Workers(daemon.folder)
        for _ in range(NUM_WORKERS):
            workers.start()
        deadline = time.monotonic() + DURATION_S
        next_kill = time.monotonic() + 1
        while (now := time.monotonic()) < deadline:
            select.select([], [], [], max(0.0, min(next_kill, deadline) - now))
            workers.check_alive()
            if time.monotonic() >= next_kill:
                next_kill += 1
                workers.kill_one(choose)
                workers.start()
        workers.stop()

        with kvd_client.connect(daemon.folder) as client:
            eventually(lambda: len(client.status().clients) == 1, timeout_s=5)
            client.check()
            snapshot = client.status()
            eventually(lambda: daemon.num_descriptors() == num_descriptors, timeout_s=5)
        (pool,) = snapshot.pools
        assert (pool.num_references, pool.num_reserved, pool.num_filling) == (0, 0, 0)
        assert sum(report.get("verified_nbytes", 0) for report in workers.reports) > 0
        assert pool.counters["hits"] > 0
        assert pool.counters["evictions"] > 0
