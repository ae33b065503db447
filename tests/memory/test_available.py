from __future__ import annotations

from pathlib import Path

import pytest

from kvd.errors import OutOfMemory
from kvd.memory import auto_budget_nbytes, available_memory_nbytes, check_budget, free_huge_pages_nbytes, reserve_nbytes

MIB = 1 << 20
GIB = 1 << 30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(
        tmp_path / "proc/meminfo",
        "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"
        "HugePages_Free:       10\nHugePages_Rsvd:        2\nHugepagesize:       2048 kB",
    )
    return tmp_path / "proc"


def v2(folder: Path, limit: object, usage: int, inactive_file: int) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", usage)
    write(folder / "memory.stat", f"anon 1\ninactive_file {inactive_file}")


def test_without_a_cgroup_it_is_what_the_kernel_calls_available(proc: Path, tmp_path: Path) -> None:
    assert available_memory_nbytes(proc, tmp_path / "none") == 8 * GIB


def test_the_tightest_cgroup_on_the_way_up_counts(proc: Path, tmp_path: Path) -> None:  # case D1
    mount = tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/user.slice/kvd.service")
    v2(mount / "user.slice/kvd.service", "max", 10, 0)
    v2(mount / "user.slice", 2 * GIB, GIB + 512 * MIB, 256 * MIB)
    assert available_memory_nbytes(proc, mount) == 768 * MIB


def test_a_container_sees_its_own_cgroup_as_the_root(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/system.slice/docker-0123.scope")  # a path of the host, absent here
    v2(mount, GIB, 256 * MIB, 0)
    assert available_memory_nbytes(proc, mount) == 768 * MIB


def test_version_1_cgroups_count_too(proc: Path, tmp_path: Path) -> None:  # case D1
    mount = tmp_path / "cgroup"
    write(proc / "self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/")
    write(mount / "memory/a/memory.limit_in_bytes", GIB)
    write(mount / "memory/a/memory.usage_in_bytes", 512 * MIB)
    write(mount / "memory/a/memory.stat", f"inactive_file 1\ntotal_inactive_file {128 * MIB}")
    write(mount / "memory/memory.limit_in_bytes", 9223372036854771712)
    write(mount / "memory/memory.usage_in_bytes", 1)
    write(mount / "memory/memory.stat", "total_inactive_file 0")
    assert available_memory_nbytes(proc, mount) == 640 * MIB


def test_a_cgroup_over_its_limit_has_nothing_left(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/")
    v2(tmp_path / "cgroup", GIB, 2 * GIB, 0)
    assert available_memory_nbytes(proc, tmp_path / "cgroup") == 0


@pytest.mark.parametrize("text", ["", "MemAvailable: lots", "MemTotal: 1 kB"])
def test_an_unreadable_figure_is_a_typed_error(tmp_path: Path, text: str) -> None:
    write(tmp_path / "meminfo", text)
    with pytest.raises(OutOfMemory, match="cannot tell"):
        available_memory_nbytes(tmp_path, tmp_path)
    with pytest.raises(OutOfMemory, match="cannot tell"):
        available_memory_nbytes(tmp_path / "absent", tmp_path)


def test_the_real_machine_has_some_memory() -> None:
    assert available_memory_nbytes() > 64 * MIB


def test_reserved_huge_pages_are_not_free(proc: Path) -> None:
    assert free_huge_pages_nbytes(proc) == 16 * MIB


def test_huge_pages_of_another_size_are_not_used(proc: Path) -> None:
    write(proc / "meminfo", "HugePages_Free: 10\nHugepagesize: 1048576 kB")
    assert free_huge_pages_nbytes(proc) == 0


@pytest.mark.parametrize(
    ("available", "budget"),
    [(64 * GIB, 8 * GIB), (16 * GIB, 4 * GIB), (GIB, 256 * MIB), (300 * MIB, 64 * MIB), (0, 64 * MIB)],
)
def test_the_automatic_budget_is_whole_segments(available: int, budget: int) -> None:
    assert auto_budget_nbytes(available, 64 * MIB) == budget


def test_the_reserve_grows_with_the_machine() -> None:
    assert reserve_nbytes(GIB) == 512 * MIB
    assert reserve_nbytes(100 * GIB) == 5 * GIB


def test_a_budget_above_the_memory_there_is_says_what_would_fit() -> None:  # case D1
    check_budget(4 * GIB, 4 * GIB)
    with pytest.raises(OutOfMemory, match="at most 3584MiB"):
        check_budget(5 * GIB, 4 * GIB)
