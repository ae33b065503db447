"""What the kernel refuses, whatever a client does to its own mappings."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import kvd_client
from kvd.errors import StateError
from kvd.protocol.replies import Failed, Reply
from kvd.protocol.requests import Request, Seal
from kvd_client.transport.channel import BlockingChannel
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.client.processes import run_python
from tests.support.daemon import Daemon
from tests.support.mappings import permissions

pytestmark = host_only("about the page table of host memory; a card has nothing like it")
PROMPT = list(range(400, 500))
WRITER = """
import ctypes, sys
import kvd_client
from kvd_client.memory import libc
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL, fill
client = kvd_client.connect(sys.argv[1])
seq = client.cache(model=MODEL, layout=LAYOUT).sequence(list(range(400, 500)), wait_s=0)
fill(seq, seq.token_ids)
seq.commit()
print("committed", flush=True)
"""
READER = """
import ctypes, sys
import kvd_client
from kvd_client.memory import libc
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL
client = kvd_client.connect(sys.argv[1])
seq = client.cache(model=MODEL, layout=LAYOUT).sequence(list(range(400, 500)), wait_s=0)
address = seq.array().data_ptr()
print("attached", seq.num_cached_tokens, flush=True)
"""


@pytest.fixture
def published(client: kvd_client.Client) -> kvd_client.Sequence:
    seq = client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT)
    fill(seq, PROMPT)
    seq.commit()
    return seq


# case D3
@pytest.mark.parametrize(
    "stray",
    ["seq.layer(1)[0][0, 5] = 3", "seq.array()[95] = 1", "seq.buffer()[0] = 1", "early[0, 0, 0] = 5"],
)
def test_a_writers_stray_write_into_a_sealed_block_faults(daemon: Daemon, stray: str) -> None:
    script = WRITER.replace("seq.commit()", "early = seq.layer(0)[0]\nseq.commit()")
    finished = run_python(f"{script}{stray}\nprint('written')", str(daemon.folder))
    assert finished.stdout == "committed\n", finished.stderr
    assert finished.returncode == -signal.SIGSEGV


# case D3
def test_a_block_is_read_only_before_its_seal_is_asked_for(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        address = seq.array().data_ptr()
        channel, asked = client._runner._current[1], []

        def exchange(request: Request, bound_s: float) -> Reply:
            asked.append((type(request), permissions(address)))
            return BlockingChannel.exchange(channel, request, bound_s)

        monkeypatch.setattr(channel, "exchange", exchange)
        assert permissions(address) == "rw-s"
        seq.commit()
        assert asked == [(Seal, "r--s")]


def test_a_block_whose_seal_is_refused_is_written_on(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        address, asked = seq.array().data_ptr(), []

        def refuse(request: Request, _bound_s: float) -> Reply:
            asked.append(permissions(address))
            return Failed(request.request_id, client.epoch, StateError.code, "refused")

        with monkeypatch.context() as patch:
            patch.setattr(client._runner._current[1], "exchange", refuse)
            with pytest.raises(StateError, match="refused"):
                seq.commit()
        assert (asked, permissions(address)) == (["r--s"], "rw-s")
        assert seq.commit() == 96


# case D3
@pytest.mark.parametrize("when", ["before it is sealed", "after it was sealed"])
def test_a_stray_write_through_what_a_sequence_has_left_faults(daemon: Daemon, when: str) -> None:
    script = """
import sys
import kvd_client
from kvd.errors import OutOfMemory
from kvd_client.memory.mapped_storage import MappedStorage
from tests.client.kv import LAYOUT, MODEL, fill
def refuse(*_arguments, **_options):
    raise OutOfMemory("no more mappings")
client = kvd_client.connect(sys.argv[1])
seq = client.cache(model=MODEL, layout=LAYOUT).sequence(list(range(400, 500)), max_tokens=2000)
fill(seq, seq.token_ids)
early = seq.array()
early[5] = early[5].clone()
MappedStorage.attach = refuse
seq.extend(1000)
assert seq.is_materialized
if "after" in sys.argv[2]:
    assert seq.commit() == 96
print("left", flush=True)
early[5] = 3
print("written")
"""
    finished = run_python(script, str(daemon.folder), when)
    assert finished.stdout == "left\n", finished.stderr
    assert finished.returncode == -signal.SIGSEGV


# case D3
def test_a_readers_write_faults_and_harms_nobody(
    daemon: Daemon, published: kvd_client.Sequence, client: kvd_client.Client
) -> None:
    finished = run_python(READER + "seq.array()[0] = 1\nprint('written')", str(daemon.folder))
    assert finished.stdout == "attached 96\n", finished.stderr
    assert finished.returncode == -signal.SIGSEGV
    assert holds(published, PROMPT, 100)
    client.check()


# case D3
def test_the_kernel_refuses_a_session_that_never_reserved_anything_writable(
    daemon: Daemon, published: kvd_client.Sequence
) -> None:
    attempts = """
import ctypes, os, sys
import kvd_client
from kvd.hashing import chain_hashes, encode_tokens, pack_hashes
from kvd.protocol.requests import Begin
from kvd.protocol.wire import unpack_block_ids
from kvd_client.memory import libc
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL
client = kvd_client.connect(sys.argv[1])
cache = client.cache(model=MODEL, layout=LAYOUT)
link = client._runner.link
opened = link.caches[cache._spec]
hashes = pack_hashes(chain_hashes(opened.digest, encode_tokens(range(400, 496)), 16))
begun = client._runner._current[1].exchange(Begin(link.next_id(), link.epoch, opened.handle, hashes, 6, 6), 10)
(run,) = opened.memory.runs(unpack_block_ids(begun.blocks), writable=False)
nbytes = 6 * LAYOUT.block_nbytes
address = libc.mmap(0, nbytes, libc.PROT_READ, libc.MAP_SHARED, run.fd, run.offset)
print(begun.num_cached, len(link._segments._writable), flush=True)
def refused(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("allowed")
refused(libc.mprotect, address, 4096, libc.PROT_READ | libc.PROT_WRITE)
refused(libc.mmap, 0, 4096, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, run.fd)
refused(os.pwrite, run.fd, b"x", 0)
refused(os.ftruncate, run.fd, 0)
refused(lambda: link._segments.find(opened.memory.pool, 0, writable=True) or 1 / 0)
"""
    finished = run_python(attempts, str(daemon.folder))
    lines = finished.stdout.splitlines()
    assert lines[:1] == ["6 0"], finished.stderr
    assert len(lines) == 6
    assert all("Permission denied" in line for line in lines[1:3]), lines
    assert all("Error" in line for line in lines[3:]), lines
    assert holds(published, PROMPT, 100)


def test_touching_beyond_what_is_reserved_faults(daemon: Daemon) -> None:
    script = READER.replace("seq.array().data_ptr()", "seq.array(0, 0).data_ptr()")
    beyond = "ctypes.string_at(address + seq.max_tokens * LAYOUT.token_nbytes - 1, 1)\nprint('read')"
    finished = run_python(script + beyond, str(daemon.folder))
    assert finished.stdout == "attached 0\n", finished.stderr
    assert finished.returncode == -signal.SIGSEGV


def test_every_descriptor_is_closed_on_exec(published: kvd_client.Sequence) -> None:
    assert published.num_sealed_tokens == 96
    for entry in Path("/proc/self/fdinfo").iterdir():
        target = Path(f"/proc/self/fd/{entry.name}")
        if entry.exists() and target.is_symlink() and "memfd" in str(target.readlink()):
            flags = next(line for line in entry.read_text().splitlines() if line.startswith("flags"))
            assert int(flags.split()[1], 8) & os.O_CLOEXEC
