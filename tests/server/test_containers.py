"""Clients in other namespaces, as in containers: the kernel still names them, and still tells when they die.

Runs as root, for unshare(1).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import client_process
from tests.support.raw_client import RawClient, hashes, totals
from tests.support.stopwatch import within

NAMESPACES = {
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "mount": ["unshare", "--mount"],
}


@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_client_in_a_container_attaches_shares_and_dies(daemon, kind):  # case B15
    with RawClient(daemon.folder) as observer:
        cache = observer.open_cache()
        with client_process(daemon.folder, prefix=NAMESPACES[kind], seal=20) as client:
            [contained] = [one for one in observer.status().clients if one.label == "subprocess"]
            if kind == "pid":
                # Its own idea of its pid is another; ours is the kernel's, as seen from the daemon.
                assert client.tell({})["done"] != contained.pid
            entry = "ns/mnt" if kind == "mount" else "ns/pid"
            assert Path(f"/proc/{contained.pid}", entry).readlink() != Path("/proc/self", entry).readlink()
            names = hashes(*(f"block {index}" for index in range(20)))
            begun = observer.begin(cache, names, num_blocks=20)
            assert begun.num_cached == 20
            assert totals(observer.status()) == (40, 0)
            os.kill(contained.pid, signal.SIGKILL)
            within(1.0, lambda: totals(observer.status()) == (20, 0), daemon.pid)
        observer.check()


def test_a_client_sees_the_daemon_under_another_path(daemon, tmp_path):  # case B15
    """The folder is mounted elsewhere in the client's mount namespace; no absolute path travels."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    prefix = ["unshare", "--mount", "sh", "-c", f'mount --bind {daemon.folder} {elsewhere} && exec "$@"', "sh"]
    with RawClient(daemon.folder) as observer, client_process(Path(elsewhere), prefix=prefix, seal=3) as client:
        assert totals(observer.status()) == (3, 0)
        client.kill()
        within(1.0, lambda: totals(observer.status()) == (0, 0), daemon.pid)
