"""How much memory the machine, or the cgroup around this process, can still give.

Asked before every allocation: inside a memory cgroup the kernel answers an allocation beyond the limit by killing a
process, not by an error, so the only clean refusal is our own.
"""

from __future__ import annotations

from pathlib import Path

from kvd.errors import OutOfMemory

MIN_RESERVE_NBYTES = 512 << 20
RESERVE_FRACTION = 0.05
AUTO_BUDGET_FRACTION = 0.25
MAX_AUTO_BUDGET_NBYTES = 8 << 30
HUGE_PAGE_NBYTES = 2 << 20


def available_memory_nbytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated now: MemAvailable, or less where a memory cgroup (v1 or v2) has less headroom.

    Every cgroup from ours up to the root may hold a limit; the tightest counts. Page cache that the kernel can drop is
    counted as free, as MemAvailable does. Any thread may call it. Raises `OutOfMemory` when /proc/meminfo cannot be
    read.
    """
    headrooms = [_meminfo_nbytes(proc / "meminfo", "MemAvailable")]
    for folder, limit, usage, cache in _memory_cgroups(proc / "self/cgroup", cgroup):
        headroom = _cgroup_headroom_nbytes(folder, limit, usage, cache)
        if headroom is not None:
            headrooms.append(headroom)
    return max(0, min(headrooms))


def reserve_nbytes(available_nbytes: int) -> int:
    """What is left to the rest of the machine: 5 % of what was available at the start, at least 512 MiB."""
    return max(MIN_RESERVE_NBYTES, int(available_nbytes * RESERVE_FRACTION))


def auto_budget_nbytes(available_nbytes: int, segment_nbytes: int) -> int:
    """The budget for "auto": a quarter of what is available, at most 8 GiB, whole segments, at least one."""
    wanted = min(int(available_nbytes * AUTO_BUDGET_FRACTION), MAX_AUTO_BUDGET_NBYTES)
    return max(wanted // segment_nbytes, 1) * segment_nbytes


def check_budget(budget_nbytes: int, available_nbytes: int) -> None:
    """Raises `OutOfMemory` for a budget larger than the memory there is; the message says what would fit."""
    if budget_nbytes > available_nbytes:
        raise OutOfMemory(
            f"a memory budget of {budget_nbytes >> 20} MiB is more than the {available_nbytes >> 20} MiB available; "
            f"set memory.budget to at most {max(0, available_nbytes - reserve_nbytes(available_nbytes)) >> 20}MiB"
        )


def free_huge_pages_nbytes(proc: Path = Path("/proc")) -> int:
    """Bytes in free, unreserved huge pages of the default size, 0 unless that size is 2 MiB."""
    path = proc / "meminfo"
    if _meminfo_nbytes(path, "Hugepagesize", default=0) != HUGE_PAGE_NBYTES:
        return 0
    num_free = _meminfo_nbytes(path, "HugePages_Free", default=0) - _meminfo_nbytes(path, "HugePages_Rsvd", default=0)
    return max(0, num_free) * HUGE_PAGE_NBYTES


def _meminfo_nbytes(path: Path, field: str, default: int | None = None) -> int:
    """The field in bytes; one that meminfo gives without a unit (a count of pages) as it stands."""
    try:
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                number, _, unit = rest.strip().partition(" ")
                return int(number) * (1024 if unit == "kB" else 1)
    except (OSError, ValueError) as error:
        raise OutOfMemory(f"cannot tell how much memory is available from {path}: {error}") from error
    if default is None:
        raise OutOfMemory(f"cannot tell how much memory is available: {path} has no {field}")
    return default


def _memory_cgroups(self_cgroup: Path, mount: Path) -> list[tuple[Path, str, str, str]]:
    """(folder, limit file, usage file, reclaimable field of memory.stat) from our own cgroup up to the mount."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str, str]] = []
    for line in lines:
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0":
            root, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path is the host's, while the mount shows our own cgroup as its root: folders that
        # are not there are passed over by the reader, and the root itself is always looked at.
        folder = root / path.lstrip("/")
        while folder != root and root in folder.parents:
            found.append((folder, *names))
            folder = folder.parent
        found.append((root, *names))
    return found


def _cgroup_headroom_nbytes(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """None where this cgroup sets no limit (or the file is not there, as in the root cgroup of v2)."""
    try:
        limit_text = (folder / limit).read_text().strip()
        if limit_text == "max":
            return None
        used_nbytes = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit_text) - used_nbytes + int(stat.get(cache, 0))
    except (OSError, ValueError):
        return None
