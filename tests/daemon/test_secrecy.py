"""No secret leaves the daemon by a side door: core dumps, /proc, ptrace, the log, status."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from pathlib import Path

import msgspec
import pytest

from kvd.daemon.secrecy import keep_memory_private
from kvd.protocol.requests import Spill
from tests.support.daemon import running_daemon
from tests.support.mappings import segment_flags
from tests.support.raw_client import RawClient, hashes
from tests.support.redis_servers import running_server
from tests.support.unprivileged import as_nobody
from tests.support.wait import eventually

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
CLOSED = ("mem", "environ", "maps", "smaps", "fd/0", "fdinfo/0", "auxv")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may look")


def may_open(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        return False
    return True


def may_trace(pid: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None):
        assert ctypes.get_errno() == errno.EPERM
        return False
    os.waitpid(pid, 0)
    libc.ptrace(PTRACE_DETACH, pid, None, None)
    return True


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "as any process"])
def test_the_same_user_cannot_look_into_the_daemon(is_kept):  # case F1
    """Both processes are nobody's; without the call the same looks succeed, so it is the call that refuses them."""

    def looks() -> bool:
        ready, done = os.pipe()
        child = os.fork()
        if not child:
            if is_kept:
                keep_memory_private()
            os.write(done, b"x")
            signal.pause()
        try:
            # A process that changed its user is not dumpable; as any other is after execve(2).
            os.read(ready, 1)
            expected = not is_kept
            found = {name: may_open(f"/proc/{child}/{name}") for name in CLOSED}
            return set(found.values()) == {expected} and may_trace(child) is expected
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def as_if_started_by_a_login() -> bool:
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        return looks()

    assert as_nobody(as_if_started_by_a_login)


@as_root
def test_a_daemon_is_never_dumped_and_its_servers_neither(tmp_path):
    with running_daemon(tmp_path, tiers={"redis": {"url": "embedded", "budget": 16 << 20}}) as daemon:
        with RawClient(daemon.folder) as raw:
            eventually(lambda: [one.state for one in raw.status().tiers] == ["up"], 20)
        threads = Path(f"/proc/{daemon.pid}/task").iterdir()
        children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        assert children
        for pid in (daemon.pid, *children):
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
            assert next(line.split()[4:6] for line in limits if line.startswith("Max core file size")) == ["0", "0"]
            assert int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16) == 0


@as_root
def test_the_daemons_own_mappings_are_left_out_of_core_dumps(tmp_path):
    with (
        running_server() as server,
        running_daemon(tmp_path, tiers={"redis": {"url": server.url}}) as daemon,
        RawClient(daemon.folder) as raw,
    ):
        packed = hashes("a", "b")
        cache = raw.open_cache()
        raw.seal(cache, raw.begin(cache, packed, num_blocks=2).blocks, packed)
        raw.close()
        with RawClient(daemon.folder) as again:
            eventually(lambda: again.ask(Spill).num_left == 0, 20)
            # The mapping of the copies, which stays with its segment; the one under construction is unmapped by now.
            found = segment_flags(daemon.pid)
            assert found
            assert all("dd" in flags for flags in found)


def test_a_password_is_neither_in_status_nor_in_the_log(tmp_path):
    url = "redis://:swordfish-7@127.0.0.1:1/0"
    with running_daemon(tmp_path, tiers={"redis": {"url": url}}, log={"level": "debug"}) as daemon:
        with RawClient(daemon.folder) as raw:
            eventually(lambda: "cannot be reached" in daemon.log(), 20)
            assert b"swordfish" not in msgspec.json.encode(raw.status())
        assert "swordfish" not in daemon.log()
