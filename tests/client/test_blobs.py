"""Blobs through a real daemon: bytes of any length under a key, whole or not at all."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import kvd_client
import kvd_client.aio
from kvd.blobs import BlobHead, head_hash
from kvd.errors import CorruptBlock, InvalidRequest, OutOfBlocks, QuotaExceeded
from kvd.hashing import NamespaceDigest, pack_hashes
from kvd.protocol.replies import Begun
from kvd.protocol.requests import Begin, Forget
from kvd.protocol.wire import unpack_block_ids
from kvd_client.core import blob_core, verbs
from kvd_client.core.verb import expect
from tests.client.processes import ROOT, environment
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import running_server
from tests.support.wait import eventually

BLOCK = 64 << 10
NAME = "state of a model"


def content(nbytes: int, seed: int = 1) -> bytes:
    step = bytes((seed * 37 + i * 11) % 251 for i in range(251))
    return (step * (nbytes // 251 + 1))[:nbytes]


@pytest.fixture
def daemon(tmp_path, home) -> Iterator[Daemon]:
    """On a machine with a card blobs are in the host memory beside it."""
    memory = {} if home is None else {"host": {"budget": 8 << 20}}
    with running_daemon(tmp_path, budget="8MiB", memory=memory, machine=home) as daemon:
        yield daemon


@pytest.fixture
def client(daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.folder) as client:
        yield client


@pytest.fixture
def blobs(client):
    return client.blobs(NAME, block_nbytes=BLOCK)


def held_nbytes(client: kvd_client.Client) -> int:
    return sum(session.held_nbytes for session in client.status().clients)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17])
def test_another_client_gets_what_was_put(daemon, blobs, nbytes):
    data = content(nbytes)
    assert blobs.put(b"key", data)
    with kvd_client.connect(daemon.folder) as reader:
        theirs = reader.blobs(NAME, block_nbytes=BLOCK)
        view = theirs.get(b"key")
        assert view == data
        assert view.readonly
        assert theirs.size(b"key") == nbytes
        target = bytearray(nbytes + 3)
        assert theirs.get(b"key", target) == data
        assert target == data + bytes(3)
        del view


def test_parts_are_put_one_after_the_other(blobs):
    parts = [b"a" * 70_000, b"", bytearray(b"b" * 10), memoryview(b"c" * 200_000)]
    blobs.put(b"key", iter(parts))
    assert blobs.get(b"key") == b"".join(bytes(part) for part in parts)


def test_a_key_keeps_its_first_content_unless_told_otherwise(blobs):
    first, second = content(100_000, 1), content(200_000, 2)
    assert blobs.put(b"key", first)
    assert not blobs.put(b"key", second)
    assert blobs.get(b"key") == first
    assert blobs.put(b"key", second, replace=True)
    assert blobs.get(b"key") == second


def test_latest_is_the_last_that_exists_and_pins_nothing(client, blobs):
    keys = [b"%d tokens" % n for n in range(1000)]
    assert blobs.latest(keys) is None
    assert blobs.latest([]) is None
    blobs.put(keys[3], b"x")
    blobs.put(keys[700], b"y")
    num_requests = client.status().counters["requests"]
    assert blobs.latest(keys) == 700
    assert client.status().counters["requests"] == num_requests + 2, "one, beside that of the status"
    assert blobs.latest(keys[:700]) == 3
    assert held_nbytes(client) == 0


def test_one_content_under_many_keys_is_stored_once(client, blobs):
    data = content(4 * BLOCK)
    blobs.put(b"long", data, also=[b"short", b"shorter"])
    assert blobs.get(b"short") == blobs.get(b"shorter") == data
    bodies = next(one for one in client.status().namespaces if one.engine == "blob/1")
    assert bodies.counters["seals"] == 4


def test_memory_stays_as_long_as_a_view_of_it_and_no_longer(client, blobs):
    data = content(3 * BLOCK)
    blobs.put(b"key", data)
    view = blobs.get(b"key")
    part = view[BLOCK:]
    del view
    assert held_nbytes(client) == 3 * BLOCK
    blobs.delete(b"key")
    for number in range(200):  # more than the pool holds
        blobs.put(b"%d" % number, content(2 * BLOCK, number))
    assert part == data[BLOCK:]
    del part
    gc.collect()
    eventually(lambda: held_nbytes(client) == 0)
    client.check()


def test_a_view_outlives_its_client(daemon):
    data = content(2 * BLOCK)
    with kvd_client.connect(daemon.folder) as client:
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        blobs.put(b"key", data)
        view = blobs.get(b"key")
    assert view == data
    del view


def test_what_is_deleted_is_gone(blobs):
    assert not blobs.delete(b"key")
    blobs.put(b"key", content(BLOCK), also=[b"other"])
    assert blobs.delete(b"key")
    assert blobs.latest([b"key"]) is None
    assert blobs.get(b"other") is None, "its content is gone under every key"
    assert blobs.latest([b"other"]) is None, "and what is left of it is forgotten"


def whole(client: kvd_client.Client, blobs: kvd_client.Blobs, key: bytes):
    """Handle, names of the body's blocks."""

    def verb(link):
        heads = yield from blob_core._open(link, blobs._spaces.heads)
        bodies = yield from blob_core._open(link, blobs._spaces.bodies)
        head = yield from blob_core._read_head(link, heads, head_hash(NamespaceDigest(heads.digest), key))
        return bodies, head.body_hashes(NamespaceDigest(bodies.digest), BLOCK)

    return client._runner.run(verb)


def lose_block(client: kvd_client.Client, blobs: kvd_client.Blobs, key: bytes, place: int, *, below: bool) -> None:
    """As if it had been evicted."""
    bodies, hashes = whole(client, blobs, key)

    def verb(link):
        yield Forget(link.next_id(), link.epoch, bodies.handle, hashes[place], below)

    client._runner.run(verb)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_blob_without_one_of_its_blocks_is_a_miss_and_its_remains_go(client, blobs, place):
    blobs.put(b"key", content(4 * BLOCK))
    lose_block(client, blobs, b"key", place, below=True)
    assert blobs.latest([b"key"]) == 0, "nobody knows yet"
    assert blobs.get(b"key") is None
    assert blobs.latest([b"key"]) is None
    assert sum(pool.num_sealed for pool in client.status().pools) == 0
    assert blobs.put(b"key", b"anew")
    client.check()


def test_eviction_under_pressure_gives_misses_and_never_halves(client, blobs):
    data = {b"%d" % number: content(10 * BLOCK + number, number) for number in range(40)}
    for key, value in data.items():
        blobs.put(key, value)
    found = {key: view for key in data if (view := blobs.get(key)) is not None}
    assert 0 < len(found) < len(data)
    assert all(view == data[key] for key, view in found.items())
    del found
    client.check()


def test_no_room_is_an_error_that_stores_nothing(client, blobs):
    with pytest.raises(OutOfBlocks):
        blobs.put(b"key", content(9 << 20))
    assert blobs.latest([b"key"]) is None
    assert held_nbytes(client) == 0


def test_a_blob_counts_to_the_quota(tmp_path):
    with (
        running_daemon(tmp_path, budget="8MiB", limits={"session_nbytes": 4 * BLOCK}) as daemon,
        kvd_client.connect(daemon.folder) as client,
    ):
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        with pytest.raises(QuotaExceeded):
            blobs.put(b"key", content(5 * BLOCK))
        assert blobs.put(b"key", content(3 * BLOCK))
        first = blobs.get(b"key")
        assert blobs.put(b"other", content(1 * BLOCK, 2))
        blobs.put(b"third", b"x")
        kept = [blobs.get(b"other")]
        with pytest.raises(QuotaExceeded):
            blobs.get(b"third")
        assert held_nbytes(client) == 4 * BLOCK
        del first, kept


def test_other_names_salts_and_block_sizes_are_other_blobs(client, blobs):
    blobs.put(b"key", b"x")
    for other in (
        client.blobs(NAME + "2", block_nbytes=BLOCK),
        client.blobs(NAME, salt="s", block_nbytes=BLOCK),
        client.blobs(NAME, block_nbytes=2 * BLOCK),
    ):
        assert other.get(b"key") is None


@pytest.mark.parametrize("key", [b"", b"x" * 4097, "text"])
def test_a_key_is_a_few_bytes(blobs, key):
    with pytest.raises(InvalidRequest):
        blobs.put(key, b"x")


def test_only_blobs_can_be_forgotten_one_by_one(client):
    from tests.client.kv import LAYOUT, MODEL

    cache = client.cache(model=MODEL, layout=LAYOUT)

    def verb(link):
        opened = yield from verbs.open_cache(link, cache._spec)
        yield Forget(link.next_id(), link.epoch, opened.handle, b"h" * 32)

    with pytest.raises(InvalidRequest, match="blobs only"):
        client._runner.run(verb)


def overwrite(client: kvd_client.Client, blobs: kvd_client.Blobs, bodies, hashes, offset: int) -> None:
    """Writes one byte into a sealed block, as a stray write of its writer would."""

    def verb(link):
        reply = expect(
            (
                yield Begin(
                    link.next_id(), link.epoch, bodies.handle, pack_hashes(hashes), len(hashes), len(hashes), False
                )
            ),
            Begun,
        )
        (run,) = bodies.memory.runs(unpack_block_ids(reply.blocks)[:1], writable=True)
        byte = os.pread(run.fd, 1, run.offset + offset)
        os.pwrite(run.fd, bytes([byte[0] ^ 1]), run.offset + offset)

    client._runner.run(verb)


@pytest.mark.parametrize("into", [None, bytearray(2 * BLOCK)])
def test_a_flipped_byte_is_refused_and_forgotten(client, blobs, into):
    blobs.put(b"key", content(2 * BLOCK))
    bodies, hashes = whole(client, blobs, b"key")
    overwrite(client, blobs, bodies, hashes[:1], 4711)
    with pytest.raises(CorruptBlock):
        blobs.get(b"key", into)
    assert blobs.get(b"key") is None
    assert blobs.put(b"key", content(2 * BLOCK))
    assert blobs.get(b"key") == content(2 * BLOCK)


def test_a_head_says_whose_it_is():
    packed = BlobHead(5, b"c" * 16).pack(b"n" * 32)
    assert BlobHead.unpack(packed, b"n" * 32) == BlobHead(5, b"c" * 16)
    for wrong in (packed[:-1], bytes([packed[0] ^ 1]) + packed[1:], bytes(len(packed)), packed[:-1] + b"\xff"):
        with pytest.raises(CorruptBlock):
            BlobHead.unpack(wrong, b"n" * 32)
    with pytest.raises(CorruptBlock):
        BlobHead.unpack(packed, b"m" * 32)


WRITER = """
import sys, kvd_client
from kvd_client.core import blob_core
blobs = kvd_client.connect(sys.argv[1]).blobs({name!r}, block_nbytes={block})
write = blob_core._write
def half(link, cache, blocks, parts):
    write(link, cache, blocks, [part[: len(part) // 2] for part in parts])
    print("half", flush=True)
    sys.stdin.read()
blob_core._write = half
blobs.put(b"key", b"x" * {block} * 8)
"""


def test_a_writer_killed_half_way_leaves_nothing(daemon, client, blobs):  # case B2
    code = WRITER.format(name=NAME, block=BLOCK)
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(daemon.folder)],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout.readline() == "half\n"
    assert held_nbytes(client) == 8 * BLOCK
    assert blobs.get(b"key") is None
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    eventually(lambda: held_nbytes(client) == 0)
    assert blobs.latest([b"key"]) is None
    assert blobs.put(b"key", b"mine")
    client.check()


@pytest.mark.parametrize("same", [True, False])
def test_concurrent_writers_of_one_key_leave_one_whole_blob(daemon, client, blobs, same, monkeypatch):
    num_writers = 4
    barrier = threading.Barrier(num_writers)
    store = blob_core._store

    def together(link, cache, hashes, parts):
        if cache.namespace.engine == "blob/1":
            barrier.wait(20)  # everybody has seen that there is none
        return (yield from store(link, cache, hashes, parts))

    monkeypatch.setattr(blob_core, "_store", together)
    data = [content(5 * BLOCK + 9, 1 if same else number) for number in range(num_writers)]
    stored: list[bool] = []

    def write(number: int) -> None:
        with kvd_client.connect(daemon.folder) as own:
            stored.append(own.blobs(NAME, block_nbytes=BLOCK).put(b"key", data[number]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored.count(True) == 1
    assert blobs.get(b"key") in data
    eventually(lambda: held_nbytes(client) == 0)
    bodies = sum(pool.num_sealed for pool in client.status().pools if pool.block_nbytes == BLOCK)
    assert bodies == 6, "the losers' contents are forgotten"
    client.check()


async def test_the_asyncio_twin_does_the_same(daemon):
    data = content(3 * BLOCK)
    async with kvd_client.aio.connect(daemon.folder) as client:
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        assert await blobs.put(b"key", [data[:100], data[100:]], also=[b"other"])
        assert await blobs.get(b"other") == data
        assert await blobs.get(b"key", bytearray(len(data))) == data
        assert await blobs.size(b"key") == len(data)
        assert await blobs.latest([b"key", b"none"]) == 0
        assert await blobs.delete(b"key")
        assert await blobs.get(b"key") is None


def copy_down(client: kvd_client.Client) -> None:
    eventually(lambda: client.spill() == 0)


@pytest.fixture
def tiered() -> Iterator[Callable[..., dict]]:
    with running_server() as server:
        yield {"redis": {"url": server.url}, "drain_s": 10.0}


def test_a_blob_goes_down_comes_up_and_is_forgotten_everywhere(tmp_path, tiered):
    data = content(6 * BLOCK)
    with running_daemon(tmp_path, budget="8MiB", tiers=tiered) as daemon, kvd_client.connect(daemon.folder) as client:
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        blobs.put(b"key", data)
        copy_down(client)
        client.flush(model=NAME, tier="pool")
        assert blobs.latest([b"none", b"key", b"none"]) == 1
        assert blobs.get(b"key", wait_s=10) == data
        assert blobs.delete(b"key")
        assert blobs.latest([b"key"]) is None
        assert blobs.get(b"key", wait_s=10) is None


def test_a_middle_block_that_no_tier_has_is_a_miss_and_the_remains_go_below_too(tmp_path, tiered):
    with running_daemon(tmp_path, budget="8MiB", tiers=tiered) as daemon, kvd_client.connect(daemon.folder) as client:
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        blobs.put(b"key", content(6 * BLOCK))
        copy_down(client)
        lose_block(client, blobs, b"key", 3, below=True)
        client.flush(model=NAME, tier="pool")
        assert blobs.get(b"key", wait_s=10) is None
        assert blobs.latest([b"key"]) is None


def test_blocks_in_memory_and_blocks_below_make_one_blob(tmp_path, tiered):
    data = content(6 * BLOCK)
    with running_daemon(tmp_path, budget="8MiB", tiers=tiered) as daemon, kvd_client.connect(daemon.folder) as client:
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        blobs.put(b"key", data)
        copy_down(client)
        for place in (1, 4):
            lose_block(client, blobs, b"key", place, below=False)
        assert blobs.get(b"key", wait_s=10) == data


def test_a_flush_is_final_for_blobs(tmp_path, tiered):  # case A9
    with running_daemon(tmp_path, budget="8MiB", tiers=tiered) as daemon, kvd_client.connect(daemon.folder) as client:
        blobs = client.blobs(NAME, block_nbytes=BLOCK)
        blobs.put(b"key", content(6 * BLOCK))
        copy_down(client)
        client.flush(model=NAME)
        assert blobs.get(b"key", wait_s=10) is None


def test_blobs_survive_a_restart_of_the_daemon_and_one_of_redis(tmp_path):
    data = content(6 * BLOCK + 5)
    with running_server() as server:
        tiers = {"redis": {"url": server.url}, "drain_s": 20.0}
        with running_daemon(tmp_path, budget="8MiB", tiers=tiers) as daemon:
            with kvd_client.connect(daemon.folder) as client:
                client.blobs(NAME, block_nbytes=BLOCK).put(b"key", data)
            assert daemon.stop() == 0
            daemon.start()
            with kvd_client.connect(daemon.folder) as client:
                blobs = client.blobs(NAME, block_nbytes=BLOCK)
                assert blobs.get(b"key", wait_s=10) == data
                server.kill()  # everything in it is lost, memory serves on
                assert blobs.get(b"key") == data
                assert blobs.put(b"other", data[:BLOCK])
                server.start()
                client.flush(model=NAME, tier="pool")
                assert blobs.get(b"key", wait_s=5) is None
                assert blobs.put(b"key", data)
                assert blobs.get(b"key") == data
