from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kvd.errors import DaemonUnavailable
from kvd.memory import ControlPage
from kvd.protocol.control_page import COUNTERS, SEQUENCE, SEQUENCE_OFFSET, ControlPageReader, DaemonState
from tests.support.shared_memory import OWN_SHARED_MEMORY, SharedMemoryOf, own_shared_memory


def said_alone(program: str, *, options: str = "mode=1777") -> str:
    """What a program prints that has a /dev/shm of its own."""
    command = [*own_shared_memory(options), sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_reader_sees_epoch_pid_state_and_counters() -> None:
    with ControlPage(epoch=2**63 + 5, pid=77) as page, ControlPageReader(page.read_only_fd) as reader:
        assert (reader.epoch, reader.pid) == (2**63 + 5, 77)
        assert reader.read().state is DaemonState.STARTING
        page.write(DaemonState.SERVING, {"num_sessions": 3, "used_nbytes": 1 << 40})
        state = reader.read()
        assert state.state is DaemonState.SERVING
        assert state.counters == dict.fromkeys(COUNTERS, 0) | {"num_sessions": 3, "used_nbytes": 1 << 40}
        assert 0 <= time.monotonic() - state.heartbeat_s < 60


def test_a_clean_end_is_told_to_those_who_still_map_the_page() -> None:
    page = ControlPage(epoch=1)
    with ControlPageReader(page.read_only_fd) as reader:
        page.close()
        page.close()
        assert reader.read().state is DaemonState.STOPPED


def test_the_page_has_no_name() -> None:
    program = """
import os
from kvd.memory import ControlPage
with ControlPage(epoch=1):
    print(os.listdir("/dev/shm"))
"""
    assert said_alone(program) == "[]\n"


def test_the_page_is_not_writable_for_readers() -> None:
    with ControlPage(epoch=1) as page:
        assert not os.get_inheritable(page.read_only_fd)
        assert os.fstat(page.read_only_fd).st_mode & 0o777 == 0o400
        with pytest.raises(PermissionError):
            mmap.mmap(page.read_only_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_reader_never_sees_half_of_a_write() -> None:
    with ControlPage(epoch=1) as page, ControlPageReader(page.read_only_fd) as reader:
        page.write(DaemonState.SERVING)
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                page.write(DaemonState.SERVING, dict.fromkeys(COUNTERS, number))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(2000):
                assert len(set(reader.read().counters.values())) == 1
        finally:
            stop.set()
            writer.join()


def test_a_daemon_that_died_while_writing_is_an_error_and_not_a_hang() -> None:
    with ControlPage(epoch=1, pid=77) as page, ControlPageReader(page.read_only_fd) as reader:
        SEQUENCE.pack_into(page._page, SEQUENCE_OFFSET, 7)
        with pytest.raises(DaemonUnavailable, match="pid 77"):
            reader.read()


def test_what_is_no_control_page_is_refused() -> None:
    with tempfile.TemporaryFile() as other:
        with pytest.raises(DaemonUnavailable, match="cannot be mapped"):
            ControlPageReader(other.fileno())
        other.truncate(4096)
        with pytest.raises(DaemonUnavailable, match="begins with"):
            ControlPageReader(other.fileno())


def test_a_full_shared_memory_is_a_clean_error_and_never_a_signal() -> None:  # case D1
    program = """
import os
from kvd.errors import OutOfMemory
from kvd.memory import ControlPage
with open("/dev/shm/filler", "wb") as filler:
    filler.write(bytes(8192))
before = len(os.listdir("/proc/self/fd"))
try:
    ControlPage(epoch=1)
except OutOfMemory as error:
    print("refused", len(os.listdir("/proc/self/fd")) - before, os.listdir("/dev/shm"), error)
"""
    assert said_alone(program, options="size=8k").startswith("refused 0 ['filler'] POSIX shared memory is full")


def test_a_killed_owner_leaves_nothing_in_shared_memory() -> None:  # case D2
    program = """
from kvd.memory import ControlPage, HostSegment, SegmentStock
page = ControlPage(epoch=1)
stock = SegmentStock(segment_nbytes=1 << 20, budget_nbytes=1 << 24, reserve=0)
stock.start()
segment = stock.take()
print("standing", flush=True)
input()
"""
    with subprocess.Popen(
        [*OWN_SHARED_MEMORY, sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "standing\n"
        with SharedMemoryOf(owner.pid) as shared_memory:
            owner.send_signal(signal.SIGKILL)
            owner.wait(timeout=10)
            assert shared_memory.names() == []


def test_two_hundred_pages_come_and_go_without_a_trace() -> None:  # case D6
    before = set(Path("/proc/self/fd").iterdir())
    for epoch in range(200):
        with ControlPage(epoch=epoch) as page, ControlPageReader(page.read_only_fd):
            pass
    assert set(Path("/proc/self/fd").iterdir()) == before
