"""Sequences in private memory: asked for, or for want of mappings. Same result as mapped ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import kvd_client
from kvd.errors import ClientClosed, CorruptBlock, OutOfMemory
from kvd.protocol.requests import Release, Request
from kvd_client.memory import libc
from kvd_client.memory.address_range import AddressRange
from kvd_client.memory.mapped_storage import MappedStorage
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.client.processes import run_python
from tests.fakecuda.machine import FakeMachine
from tests.support.daemon import Daemon

PROMPT = list(range(500, 600))


@pytest.fixture
def cache(client: kvd_client.Client) -> kvd_client.Cache:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
    return cache


def test_a_materialized_prefix_is_packed_by_layer_and_counted(
    cache: kvd_client.Cache, client: kvd_client.Client, home: FakeMachine | None
) -> None:
    with cache.sequence(PROMPT, materialize=True) as seq:
        assert seq.is_materialized
        assert seq.num_copied_bytes == 6 * LAYOUT.block_nbytes
        assert seq.layer(0)[0][0].is_contiguous()
        assert holds(seq, PROMPT, 96)
        longer = [*PROMPT, *[3] * 60]
        fill(seq, longer)
        assert seq.commit(longer) == 160
        assert holds(seq, longer, 160)
        if home is None:
            assert bytes(seq.buffer(5, 9)) == seq.array(5, 9).contiguous().view(torch.uint8).numpy().tobytes()
        with seq.fork() as other:
            seq.truncate(30)
            fill(seq, [*PROMPT[:30], *[8] * 30])
            assert holds(seq, [*PROMPT[:30], *[8] * 30], 60)
            assert holds(other, longer, 160)
    with cache.sequence([*longer, 1]) as mapped:
        assert not mapped.is_materialized
        assert mapped.num_cached_tokens == 160
        assert holds(mapped, longer, 160)
    client.check()
    (own,) = client.status().clients
    assert (own.num_references, own.num_reserved) == (0, 0)


# case D7
@host_only("mappings run out in host memory only")
def test_a_scattered_sequence_near_the_limit_of_mappings_is_copied_with_the_same_result(
    cache: kvd_client.Cache, daemon: Daemon
) -> None:
    script = """
import os, sys
import kvd_client
from kvd_client.memory import libc
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL, fill, holds
tokens = [*range(500, 600)]
client = kvd_client.connect(sys.argv[1])
cache = client.cache(model=MODEL, layout=LAYOUT)
# Scattered: all memory is taken, then every second block of it given back.
num_resident = sum(pool.num_sealed for pool in client.status().pools)
num_blocks = 16 * ((4 << 20) // LAYOUT.block_nbytes) - num_resident
taken = cache.allocate_sequence(num_blocks * LAYOUT.block_tokens, populate=False)
core = taken._core
core._post_release(reserved=core._blocks[::2])
num_tokens, spare = int(sys.argv[2]), int(sys.argv[3])
long = [*tokens, *[7] * (num_tokens - 100)]
with cache.sequence(long, max_tokens=num_tokens + 100) as seq:
    fill(seq, long)
    seq.commit()
    runs = seq._core._cache.memory.num_runs(seq._core._blocks)
limit = int(open("/proc/sys/vm/max_map_count").read())
held = open("/proc/self/maps").read().count("\\n")
pages = libc.mmap(0, 4096 * 2 * limit, 0, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE)
made = 0
while made < limit - held - spare:
    libc.mprotect(pages + 8192 * (made // 2), 4096, 1)
    made += 2
seq = cache.sequence([*long, 1], max_tokens=num_tokens + 100)
print(runs, seq.num_cached_tokens, seq.is_materialized, holds(seq, long, seq.num_cached_tokens))
longer = [*long, 1, 2, 3]
fill(seq, longer)
print(holds(seq, longer, len(longer)))
with seq.fork() as other:
    longest = [*longer, *[4] * 90]
    fill(other, longest)
    print(holds(other, longest, len(longest)), other.commit(longest))
client.check()
sys.stdout.flush()
os._exit(0)
"""
    # Seen coming, and (for few blocks, which nobody counts beforehand) found out by the kernel's refusal.
    for num_tokens, spare in ((1488, 1500), (800, 30)):
        finished = run_python(script, str(daemon.folder), str(num_tokens), str(spare))
        lines = finished.stdout.splitlines()
        assert len(lines) == 3, finished.stderr
        assert int(lines[0].split()[0]) > spare or num_tokens > 1000
        assert lines[0].split()[1:] == [str(num_tokens), "True", "True"]
        assert lines[1:] == ["True", f"True {(num_tokens + 93) // 16 * 16}"]


# case D7
@host_only("mappings run out in host memory only")
def test_what_could_not_be_mapped_is_not_unmapped(cache: kvd_client.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the limit a cut where no mapping ends would be refused, and so would giving back what was granted."""
    with cache.sequence(PROMPT) as seq:
        storage, blocks = seq._core._storage, seq._core._blocks
        cuts: list[object] = []

        def refuse(*_arguments: object, **_options: object) -> None:
            raise OutOfMemory("no more mappings")

        with monkeypatch.context() as patch:
            patch.setattr(AddressRange, "map_file", refuse)
            patch.setattr(AddressRange, "forget", lambda *arguments: cuts.append(arguments))
            with pytest.raises(OutOfMemory):
                storage.attach(len(blocks), blocks[-1:], sealed=False, populate=False)
            storage.detach(len(blocks))
        assert cuts == []
        assert holds(seq, PROMPT, 96)


# case D7
@host_only("mappings run out in host memory only")
def test_growing_without_mappings_left_goes_on_in_private_memory(
    cache: kvd_client.Cache, client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache.sequence(PROMPT, max_tokens=2000) as seq:
        keys, _ = seq.layer(0)
        fill(seq, PROMPT)

        def refuse(*_arguments: object, **_options: object) -> None:
            raise OutOfMemory("no more mappings")

        with monkeypatch.context() as patch:
            patch.setattr(MappedStorage, "attach", refuse)
            fill(seq, [*PROMPT, *[1] * 500])
        assert seq.is_materialized
        assert seq.num_copied_bytes > 0
        assert holds(seq, [*PROMPT, *[1] * 500], 600)
        assert seq.commit([*PROMPT, *[1] * 500]) == 592
        assert keys.shape[1] == 96
        assert bool((keys >= 0).all())
    with cache.sequence([*PROMPT, *[1] * 500]) as again:
        assert holds(again, [*PROMPT, *[1] * 500], 592)
    # What the tensor shows is the mapping that was left: its blocks are nobody else's while it lives.
    (own,) = client.status().clients
    assert own.num_references + own.num_reserved > 0
    del keys, _
    (own,) = client.status().clients
    assert (own.num_references, own.num_reserved) == (0, 0)


def test_verify_finds_a_block_whose_bytes_changed_after_the_seal(
    client: kvd_client.Client, home: FakeMachine | None
) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT, checksums=True)
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
    with cache.sequence(PROMPT, verify=True) as seq:
        assert holds(seq, PROMPT, 96)
        if home is None:
            (run,) = seq._core._cache.memory.runs([seq._core.block_at(3)], writable=True)
            os.pwrite(run.fd, b"\xff", run.offset + 1000)
        else:
            # Nothing protects memory on a card.
            seq.array(50, 51).view(torch.uint8).bitwise_xor_(255)
    with pytest.raises(CorruptBlock, match="tokens 48 on"):
        cache.sequence(PROMPT, verify=True)
    (own,) = client.status().clients
    assert (own.num_references, own.num_reserved, own.num_announced) == (0, 0, 0)
    # Without a checksum there is nothing to compare.
    plain = client.cache(model=MODEL, layout=LAYOUT, salt="plain")
    with plain.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
    with plain.sequence(PROMPT, verify=True, materialize=True) as seq:
        assert seq.num_cached_tokens == 96


def test_without_populate_nothing_is_mapped_ahead_and_the_bytes_are_the_same(cache: kvd_client.Cache) -> None:
    with cache.sequence(PROMPT, populate=False) as seq:
        assert holds(seq, PROMPT, 96)


# case D7
@host_only("mappings run out in host memory only")
def test_growing_without_any_memory_left_unmaps_before_it_gives_back(
    client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT, max_tokens=6000) as seq:
        fill(seq, PROMPT)
        core, link = seq._core, client._runner.link
        held = core.capacity_tokens
        start = core._storage.address + held * LAYOUT.token_nbytes
        stop = core._storage.address + 6000 * LAYOUT.token_nbytes
        mmap, post = libc.mmap, link.post
        num_mapped, found_at_release = 0, []

        def refuse_the_second(address: int, nbytes: int, protection: int, flags: int, *file: int) -> int:
            nonlocal num_mapped
            if protection != libc.PROT_NONE:
                num_mapped += 1
                if num_mapped > 1:
                    raise OutOfMemory("no more mappings")
            return mmap(address, nbytes, protection, flags, *file)

        def watch(request: Request) -> None:
            if isinstance(request, Release) and request.reserved:
                found_at_release.append(segments_mapped(start, stop))
            post(request)

        with monkeypatch.context() as patch:
            patch.setattr(libc, "mmap", refuse_the_second)
            patch.setattr(link, "post", watch)
            # More than a segment holds, so two mappings at least.
            with pytest.raises(OutOfMemory):
                seq.extend(5000)
        assert num_mapped > 2, "it tried private memory last"
        assert found_at_release == [[]]
        assert core.capacity_tokens == held
        # Nothing else has changed, and the next attempt succeeds.
        assert holds(seq, PROMPT, 100)
        longer = [*PROMPT, *[5] * 4900]
        fill(seq, longer)
        assert not seq.is_materialized
        assert holds(seq, longer, 5000)
    client.check()


@host_only("mappings run out in host memory only")
def test_what_cannot_be_unmapped_is_not_given_back(client: kvd_client.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT, max_tokens=6000) as seq:
        posted: list[Request] = []

        def refuse(*_arguments: object, **_options: object) -> None:
            raise OutOfMemory("no more mappings")

        with monkeypatch.context() as patch:
            patch.setattr(AddressRange, "make_resident", refuse)
            patch.setattr(AddressRange, "forget", refuse)
            patch.setattr(AddressRange, "map_private", refuse)
            patch.setattr(client._runner.link, "post", posted.append)
            with pytest.raises(OutOfMemory):
                seq.extend(500)
        assert posted == []


def segments_mapped(start: int, stop: int) -> list[str]:
    """The mappings of shared blocks between two addresses, as /proc/self/maps has them."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, behind = (int(address, 16) for address in line.split()[0].split("-"))
        if first < stop and start < behind and "memfd" in line:
            found.append(line)
    return found


def test_nothing_is_mapped_for_a_sequence_that_was_closed_meanwhile() -> None:
    closed = AddressRange(1 << 20)
    closed.close()
    with pytest.raises(ClientClosed):
        closed.map_file(1 << 19, 4096, -1, 0, writable=True)
