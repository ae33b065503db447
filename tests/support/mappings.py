"""What the kernel says about a process's mappings of kvd's memory."""

from __future__ import annotations

from pathlib import Path

SEGMENT_NAME = "kvd-segment"


def segment_flags(pid: int | str) -> list[set[str]]:
    """VmFlags (proc_pid_smaps(5)) of each mapping of a segment: "dd" is left out of core dumps, "dc" of fork(2)."""
    found: list[set[str]] = []
    is_segment = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            is_segment = SEGMENT_NAME in rest
        elif head == "VmFlags:" and is_segment:
            found.append(set(rest.split()))
    return found


def permissions(address: int) -> str:
    """Of this process's mapping at an address, as proc_pid_maps(5) has them; empty where nothing is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, behind = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < behind:
            return line.split()[1]
    return ""


def is_mapped(address: int) -> bool:
    """Whether anything is, a reservation included."""
    return permissions(address) != ""
