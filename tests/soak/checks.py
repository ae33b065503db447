"""What must hold when every client of a soak is gone."""

from __future__ import annotations

import kvd_client
from kvd.status import Snapshot
from tests.support.daemon import Daemon
from tests.support.wait import eventually


def check_nothing_is_left(daemon: Daemon) -> Snapshot:
    """No reference, no reservation, no copy under way, no broken invariant, in any pool."""
    with kvd_client.connect(daemon.folder) as client:
        eventually(lambda: len(client.status().clients) == 1, timeout_s=5)
        for name in ("num_filling", "num_references", "num_reserved"):
            eventually(
                lambda name=name: not any(getattr(pool, name) for pool in client.status().pools),
                timeout_s=5,
                what=lambda name=name: f"a pool has {name}",
            )
        client.check()
        return client.status()
