"""A segment's promises are the kernel's: each is tried for real, from another process and another user."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.errors import InvalidLayout, OutOfMemory
from kvd.memory import HostSegment

MIB = 1 << 20
INTRUDER = Path(__file__).with_name("intruder.py")


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def run_intruder(descriptor: int, attempt: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", str(INTRUDER), str(descriptor), attempt],
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_bytes_written_through_one_map_are_read_through_the_other() -> None:
    with (
        HostSegment(MIB) as segment,
        mmap.mmap(segment.writable_fd, MIB) as writer,
        mmap.mmap(segment.read_only_fd, MIB, prot=mmap.PROT_READ) as reader,
    ):
        writer[4096:4101] = b"hello"
        assert reader[4096:4101] == b"hello"
        assert os.fstat(segment.read_only_fd).st_size == MIB
        assert os.fstat(segment.read_only_fd).st_blocks * 512 == MIB  # resident already
        assert not os.get_inheritable(segment.writable_fd)
        assert not os.get_inheritable(segment.read_only_fd)


@pytest.mark.parametrize(
    "attempt",
    [
        "map_writable",  # case D3
        "make_map_writable",  # case D3
        "reopen_writable",  # case D3
        "write",  # case D3
        "truncate",  # case D4
        "grow",  # case D4
        "punch",  # case D4
    ],
)
def test_the_kernel_refuses_a_reader_that(attempt: str) -> None:
    with HostSegment(MIB) as segment, mmap.mmap(segment.writable_fd, MIB) as ours:
        ours[:5] = b"mine!"
        result = run_intruder(segment.read_only_fd, attempt)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == {"attempt": attempt, "refused": True}
        assert ours[:5] == b"mine!"
        assert os.fstat(segment.writable_fd).st_size == MIB


def test_a_stray_write_through_a_read_only_map_kills_the_stray_alone() -> None:  # case D3
    with HostSegment(MIB) as segment, mmap.mmap(segment.writable_fd, MIB) as ours:
        ours[:5] = b"mine!"
        assert run_intruder(segment.read_only_fd, "stray_write").returncode == -signal.SIGSEGV
        assert ours[:5] == b"mine!"


def test_even_a_writer_cannot_resize_a_segment() -> None:  # case D4
    with HostSegment(MIB) as segment:
        for size in (0, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.writable_fd, size)


def test_nobody_can_seal_a_segment_further() -> None:  # case D4
    with HostSegment(MIB) as segment:
        for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK):
            with pytest.raises(PermissionError):
                fcntl.fcntl(segment.writable_fd, fcntl.F_ADD_SEALS, seal)
        os.pwrite(segment.writable_fd, b"still written", 0)


def test_closing_gives_the_memory_back_while_others_still_hold_it() -> None:
    segment = HostSegment(MIB)
    kept = os.dup(segment.read_only_fd)
    segment.close()
    segment.close()
    assert segment.closed
    assert os.fstat(kept).st_blocks == 0
    os.close(kept)


@pytest.mark.parametrize("nbytes", [0, -4096, 4095, 4097])
def test_a_size_that_is_not_whole_pages_is_refused(nbytes: int) -> None:
    before = open_descriptors()
    with pytest.raises(InvalidLayout, match="whole number"):
        HostSegment(nbytes)
    assert open_descriptors() == before


def test_a_real_limit_is_a_clean_error_and_never_a_signal() -> None:  # case D1
    program = """
import os, resource
from kvd.errors import OutOfMemory
from kvd.memory import HostSegment
resource.setrlimit(resource.RLIMIT_FSIZE, (96 << 20, 96 << 20))
before = len(os.listdir("/proc/self/fd"))
try:
    HostSegment(128 << 20)  # the first step fits, the second does not
except OutOfMemory as error:
    print("refused", len(os.listdir("/proc/self/fd")) - before, error)
HostSegment(64 << 20).close()
print("still works")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("refused 0 a segment of 128 MiB")
    assert result.stdout.endswith("still works\n")


def test_giving_up_between_two_steps_leaves_nothing_behind() -> None:  # case D1
    before = open_descriptors()
    asked: list[int] = []

    def memory_runs_short(remaining_nbytes: int) -> None:
        asked.append(remaining_nbytes >> 20)
        if len(asked) == 2:
            raise OutOfMemory("somebody else took it")

    with pytest.raises(OutOfMemory, match="somebody else"):
        HostSegment(128 * MIB, before_step=memory_runs_short)
    assert asked == [128, 112]
    assert open_descriptors() == before


def test_no_descriptor_left_names_the_limit_to_raise() -> None:
    program = """
import resource
from kvd.errors import OutOfMemory
from kvd.memory import HostSegment
resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
try:
    HostSegment(1 << 20)
except OutOfMemory as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert "raise the limit of open files" in result.stdout, result.stderr


def test_two_hundred_segments_come_and_go_without_a_trace() -> None:  # case D6
    before = open_descriptors()
    for _ in range(200):
        with HostSegment(MIB):
            pass
    assert open_descriptors() == before
