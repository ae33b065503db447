"""The engines together: llama-servers and transformers over one daemon, which goes away in the middle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvd_client
from kvd.status import TierStatus
from tests.soak.checks import check_nothing_is_left
from tests.soak.engines import Engines, transformers_controls
from tests.soak.llama_controls import controls as llama_controls
from tests.support.daemon import Daemon, running_daemon

DURATION_S = float(os.environ.get("KVD_SOAK_S", "120"))
PATIENCE_S = 240.0
"""How long beyond its time a phase may take until what must happen has happened; only a hanging engine takes it all."""


def let_run(engines: Engines, duration_s: float, happened: Callable[[], bool]) -> None:
    """For so long, and then until `happened`."""
    tick, start_s = threading.Event(), time.monotonic()
    while (elapsed_s := time.monotonic() - start_s) < duration_s or not happened():
        engines.check()
        assert elapsed_s < duration_s + PATIENCE_S, f"{engines.summary()}, restores {engines.restores()}"
        tick.wait(0.1)


def tier(daemon: Daemon) -> TierStatus:
    """What the running daemon's only tier has done."""
    with kvd_client.connect(daemon.folder) as client:
        (found,) = client.status().tiers
    return found


def restart(daemon: Daemon) -> None:
    """As `systemctl restart` does: what it has is copied down, and found again."""
    assert daemon.stop() == 0
    daemon.start()


def crash(daemon: Daemon) -> None:
    """What had no copy below is computed again."""
    daemon.kill()
    daemon.start()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the transformers processes compare their logits with."""
    return tmp_path_factory.mktemp("oracle") / "controls.pt"


@pytest.fixture(scope="module")
def right(oracle: Path) -> dict[str, list[list[int]]]:
    """By kind of engine the right tokens of each prompt, computed without kvd, by every split."""
    return {"llama": llama_controls(), "transformers": transformers_controls(oracle)}


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(DURATION_S + 2 * PATIENCE_S + 600)
@pytest.mark.parametrize("interrupt", [restart, crash])
def test_two_llama_servers_and_two_transformers_answer_rightly_while_the_daemon_is_restarted(
    tmp_path: Path, oracle: Path, right: dict[str, list[list[int]]], interrupt: Callable[[Daemon], None]
) -> None:
    redis = {"url": "embedded", "persistence": str(tmp_path / "kept")}
    tiers = {"redis": redis, "spill": "write_through", "drain_s": 20.0}
    # Less than what the prompts take, so that blocks come up from below as well.
    with (
        running_daemon(tmp_path, budget="24MiB", segment="3MiB", tiers=tiers) as daemon,
        Engines(daemon.folder, oracle, right) as engines,
    ):
        # Who computes a prompt for the first time reuses nothing, and a llama-server's slots hold what it had itself.
        def all_share() -> bool:
            answers = engines.since(0)
            return all(sum(one.num_reused for one in answers[name]) for name in engines.NAMES) and all(
                engines.restores()
            )

        let_run(engines, DURATION_S / 2, all_share)
        # Asked before: a daemon that comes back may find all that is wanted below, and have nothing to copy down.
        assert tier(daemon).num_puts > 0
        interrupt(daemon)
        num_before, restores_before = len(engines.answers), engines.restores()

        def all_share_again() -> bool:
            answers = engines.since(num_before)
            return all(sum(one.num_reused for one in answers[name]) for name in engines.NAMES) and all(
                now > before for now, before in zip(engines.restores(), restores_before, strict=True)
            )

        let_run(engines, DURATION_S / 2, all_share_again)
        engines.stop()
        print(engines.summary())

        check_nothing_is_left(daemon)
        assert tier(daemon).num_hits > 0
