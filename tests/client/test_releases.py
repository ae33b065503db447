"""A release of more blocks than one message may name goes in several, and nothing is lost or evicted out of order."""

from __future__ import annotations

import itertools

import pytest

import kvd_client
from kvd.block import BlockId
from kvd.protocol.wire import pack_block_ids, unpack_block_ids
from kvd_client.session.releases import releases
from tests.client.kv import LAYOUT, MODEL, fill
from tests.support.daemon import running_daemon

PROMPT = list(range(1, 162))


def test_each_message_keeps_the_limit_and_the_tail_leaves_first():
    ids = [BlockId(one) for one in range(8)]
    hashes = b"".join(bytes([one]) * 32 for one in range(5))
    count = itertools.count(1)
    found = list(releases(lambda: next(count), 7, 3, blocks=pack_block_ids(ids), reserved=b"", hashes=hashes, limit=3))
    assert [unpack_block_ids(one.blocks) for one in found] == [(6, 7), (3, 4, 5), (0, 1, 2)]
    assert [len(one.hashes) // 32 for one in found] == [0, 2, 3]
    assert b"".join(one.hashes for one in reversed(found)) == hashes
    assert [(one.request_id, one.epoch, one.cache, one.ack) for one in found] == [(n, 7, 3, False) for n in (1, 2, 3)]


def test_an_empty_release_is_one_message():
    assert len(list(releases(lambda: 1, 7, 3))) == 1


@pytest.mark.usefixtures("_three_at_a_time")
def test_a_long_sequence_gives_everything_back(tmp_path):
    with (
        running_daemon(tmp_path, budget="1MiB", segment="1MiB") as daemon,
        kvd_client.connect(daemon.folder) as client,
    ):
        cache = client.cache(model=MODEL, layout=LAYOUT)
        for number in range(3):
            prompt = [number, *PROMPT]
            with cache.sequence(prompt) as seq:
                fill(seq, prompt)
                seq.commit()
        client.check()
        status = client.status()
        (pool,) = status.pools
        assert (pool.num_references, pool.num_reserved, status.counters["failed_releases"]) == (0, 0, 0)
        # What goes to make room is the tail of the oldest one.
        with cache.sequence([9] * 200, announce=False):
            assert 0 < cache.match([0, *PROMPT]) < 160
            assert cache.match([2, *PROMPT]) == 160


@pytest.fixture
def _three_at_a_time(monkeypatch):
    monkeypatch.setitem(releases.__kwdefaults__, "limit", 3)
