"""Each check of `kvd doctor` over facts made up for it: what it finds, and that it says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from kvd.cli.doctor import EXIT_CODES, render_findings
from kvd.cli.doctor_checks import CHECKS, examine, serves, worst
from kvd.cli.doctor_facts import UNLIMITED, Card, DaemonFacts, Facts, Finding, Level, TorchBuild
from tests.cli.snapshots import EMPTY, HOST_TIER, REDIS_TIER

P40 = Card(name="Tesla P40", uuid="GPU-1", total_nbytes=24 << 30, compute_capability=(6, 1))
RTX = Card(name="RTX 3050", uuid="GPU-2", total_nbytes=8 << 30, compute_capability=(8, 6))
CALM = with_fields(EMPTY, tiers=[HOST_TIER], warnings=[])
DAEMON = DaemonFacts(
    snapshot=CALM, uid=990, pid_namespace="pid:[1]", memlock_nbytes=UNLIMITED, max_descriptors=65536,
    integrity_was_checked=True,
)  # fmt: skip
TORCH = TorchBuild(version="2.7.1", cuda="12.6", arches=("sm_50", "sm_60", "sm_70", "sm_80", "compute_80"))
WELL = Facts(
    version="0.1.0", runtime_dir="/run/kvd", daemon=DAEMON, pid_namespace="pid:[1]", max_map_count=65_530,
    max_descriptors=65536, memlock_nbytes=UNLIMITED, transparent_huge_pages="madvise", num_huge_pages=0,
    num_huge_pages_free=0, overcommit_memory=0, shm_free_nbytes=1 << 30, has_nvidia_module=True, driver_branch=580,
    cards=(P40,), torch=TORCH, redis_server="/usr/bin/valkey-server", redis_url="embedded", remove_ipc=True,
    lingers=False, has_systemd=True,
)  # fmt: skip


def test_a_machine_that_is_well():
    findings = examine(WELL)
    assert worst(findings) is Level.OK
    assert {finding.check for finding in findings} == {
        "daemon", "integrity", "redis", "shm", "mappings", "memlock", "huge pages", "driver", "torch",
    }  # fmt: skip


def daemon(**changes: object) -> DaemonFacts:
    return replace(DAEMON, **changes)  # type: ignore[arg-type]


def tier(**changes: object):
    return {"daemon": daemon(snapshot=with_fields(CALM, tiers=[with_fields(REDIS_TIER, **changes)]))}


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"daemon": None, "daemon_problem": "nobody listens"}, "daemon", Level.ERROR, "nobody listens"),
        ({"version": "0.2.0"}, "daemon", Level.WARNING, "this command is kvd 0.2.0"),
        ({"daemon": daemon(snapshot=with_fields(CALM, warnings=["no"]))}, "daemon", Level.WARNING, "no"),
        ({"daemon": None, "runtime_dir_problem": "refused"}, "permissions", Level.ERROR, "refused"),
        ({"daemon": daemon(integrity="one too many")}, "integrity", Level.ERROR, "one too many"),
        ({"daemon": daemon(integrity_was_checked=False)}, "integrity", Level.NOTE, "not checked"),
        ({"daemon": daemon(num_verified=9, num_corrupt=2)}, "integrity", Level.ERROR, "2 of 9 blocks"),
        ({"daemon": daemon(num_verified=9, num_unchecked=3)}, "integrity", Level.NOTE, "3 blocks have no checksum"),
        ({"daemon": daemon(snapshot=EMPTY)}, "redis", Level.NOTE, "no tier"),
        (tier(state="down", reason="no answer"), "redis", Level.ERROR, "no answer"),
        (tier(state="probing", reason="again", kind="host"), "redis", Level.ERROR, "again"),
        ({"daemon": None, "config_problem": "unknown key"}, "config", Level.ERROR, "unknown key"),
        ({"daemon": None, "redis_server_problem": "no server"}, "redis", Level.WARNING, "no server"),
        ({"overcommit_memory": 2}, "redis", Level.WARNING, "overcommit"),
        ({"shm_problem": "/dev/shm is not there"}, "shm", Level.ERROR, "not there"),
        ({"shm_free_nbytes": 4096}, "shm", Level.WARNING, "4 KiB"),
        ({"max_map_count": 1000}, "mappings", Level.WARNING, "1000"),
        ({"daemon": daemon(max_descriptors=1024)}, "descriptors", Level.WARNING, "1024"),
        ({"daemon": None, "max_descriptors": 512}, "descriptors", Level.WARNING, "512"),
        ({"daemon": daemon(memlock_nbytes=64 << 10)}, "memlock", Level.WARNING, "64 KiB"),
        ({"transparent_huge_pages": "never"}, "huge pages", Level.WARNING, "off"),
        ({"daemon": None, "num_huge_pages": 8}, "huge pages", Level.NOTE, "all 8"),
        ({"pid_namespace": "pid:[2]"}, "pid namespace", Level.WARNING, "different PID namespaces"),
        ({"pid_namespace": "pid:[2]", "cards": ()}, "pid namespace", Level.NOTE, "different PID namespaces"),
        ({"daemon": daemon(uid=1000)}, "RemoveIPC", Level.WARNING, "uid 1000"),
        ({"cards": (), "driver_problem": "no device"}, "driver", Level.ERROR, "no device"),
        ({"cards": (), "has_nvidia_module": False}, "driver", Level.NOTE, "no NVIDIA driver"),
        ({"cards": (replace(P40, unproven="WSL2"),)}, "driver", Level.WARNING, "WSL2"),
        ({"driver_branch": 590}, "driver", Level.ERROR, "590"),
        ({"torch": None}, "torch", Level.NOTE, "not installed"),
        ({"torch": TorchBuild(version="2.15+cpu", arches=())}, "torch", Level.WARNING, "CPU build"),
        ({"torch": replace(TORCH, arches=("sm_75", "sm_80"))}, "torch", Level.ERROR, "for the Tesla P40 (sm_61)"),
        ({"cards": (P40, RTX), "torch": replace(TORCH, arches=("sm_61",))}, "torch", Level.ERROR, "RTX 3050"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_and_comes_with_a_fix(changes, check, level, words):
    findings = examine(replace(WELL, **changes))
    (found,) = [one for one in findings if one.level is not Level.OK and one.check == check and words in one.text]
    assert found.level is level
    assert found.fix or found.text == "no NVIDIA driver: host memory serves" or "torch is not installed" in found.text
    assert worst(findings) >= level


@pytest.mark.parametrize(
    "changes",
    [
        {"daemon": daemon(uid=1000), "lingers": True},
        {"daemon": daemon(uid=1000), "has_systemd": False},
        {"daemon": daemon(memlock_nbytes=8 << 30)},
        {"driver_branch": 590, "cards": (RTX,)},
        {"overcommit_memory": 2, "redis_url": "unix:///run/redis.sock"},
        {"max_descriptors": 512},
    ],
)
def test_what_does_not_matter_here_is_left_alone(changes):
    assert worst(examine(replace(WELL, **changes))) is Level.OK


def test_nothing_known_is_no_crash():
    examine(Facts())
    for check in CHECKS:
        check(Facts(cards=(P40,), torch=TorchBuild(version="2")))


@pytest.mark.parametrize(
    ("arches", "capability", "runs"),
    [
        (["sm_61"], (6, 1), True),
        (["sm_60"], (6, 1), True),
        (["sm_62"], (6, 1), False),
        (["sm_70"], (6, 1), False),
        (["sm_50"], (6, 1), False),
        (["compute_50"], (6, 1), True),
        (["compute_70"], (6, 1), False),
        (["sm_90a"], (9, 0), True),
        (["sm_120"], (12, 0), True),
        (["gfx90a", "", "sm_x"], (6, 1), False),
    ],
)
def test_which_code_runs_on_which_card(arches, capability, runs):
    assert serves(arches, capability) is runs


def test_exit_codes_follow_the_worst():
    assert [EXIT_CODES[level] for level in Level] == [0, 0, 12, 13]
    assert worst([]) is Level.OK


def test_the_page_has_the_worst_first_and_counts():
    findings = [
        Finding("a", Level.OK, "fine"),
        Finding("b", Level.WARNING, "slow\x1b[2J", "be quick"),
        Finding("c", Level.ERROR, "broken", "mend it"),
    ]
    page = [str(line) for line in render_findings(findings, show_all=True).renderables]
    assert page == [
        "error  c: broken",
        "  -> mend it",
        "warning  b: slow?[2J",
        "  -> be quick",
        "ok  a: fine",
        "1 errors, 1 warnings, 0 notes, 1 well",
    ]
    assert "ok  a: fine" not in [str(line) for line in render_findings(findings, show_all=False).renderables]
