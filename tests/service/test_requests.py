from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.protocol import requests
from kvd.protocol.replies import CacheOpened, Done, Failed
from kvd.protocol.wire import MAX_IDS_PER_MESSAGE, MAX_IDS_PER_RELEASE
from kvd.service import ServiceSettings
from tests.service.harness import LAYOUT, House, error_code, expect, names, pack, reserved_blocks


def test_opening_names_the_pool_and_the_root_of_all_hashes(house: House) -> None:
    client = house.client()
    opened = client.open()
    assert (opened.cache, opened.pool, len(opened.digest)) == (1, 0, 32)
    assert (opened.blocks_per_segment, opened.segment_nbytes) == (4, 16384)
    assert client.open().cache == 1  # the same namespace, the same handle
    other = client.open(salt="mine")
    assert (other.cache, other.pool) == (2, 0)
    assert other.digest != opened.digest


def test_the_kernels_word_makes_the_tenant(make_house: Callable[..., House]) -> None:
    by_group = make_house()
    one, two, three = by_group.client(uid=1), by_group.client(uid=2), by_group.client(uid=1, gid=200)
    assert one.open().pool == two.open().pool != three.open().pool
    assert one.digest == two.digest != three.digest
    by_user = make_house(settings=ServiceSettings(isolation="uid"))
    one, two = by_user.client(uid=1), by_user.client(uid=2)
    assert one.open().pool != two.open().pool
    assert one.digest != two.digest


def test_another_tenants_hashes_are_never_found(house: House) -> None:
    one, other = house.client(), house.client(gid=200)
    one.open(), other.open()
    (x,) = names("x")
    one.seal(one.begin([x]).reserved, [x])
    assert one.match([x]) == 1
    assert other.match([x]) == 0


def test_a_block_size_that_the_client_counts_otherwise_is_refused_with_both_figures(house: House) -> None:
    reply = expect(Failed, house.client().ask(requests.OpenCache, "m", "e", "", "", "", 1, 1, 64, "float16", 16, 8192))
    assert reply.code == "invalid-layout"
    assert "8192" in reply.message
    assert "4096" in reply.message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"block_tokens": 0}, "invalid-layout"),
        ({"block_tokens": 7}, "invalid-layout"),
        ({"num_layers": 1 << 40}, "invalid-layout"),
        ({"dtype": "int3"}, "invalid-layout"),
        ({"block_tokens": 80, "block_nbytes": 5 * 4096}, "invalid-layout"),  # larger than a segment
        ({"model": ""}, "invalid-request"),
        ({"salt": "s" * 5000}, "invalid-request"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(house: House, changes: dict[str, object], code: str) -> None:
    client = house.client()
    fields = {
        "model": "m",
        "engine": "e",
        "positional": "",
        "adapter": "",
        "salt": "",
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 64,
        "dtype": "float16",
        "block_tokens": 16,
        "block_nbytes": 4096,
    }
    assert error_code(client.ask(requests.OpenCache, **(fields | changes))) == code
    assert house.pools.usage().num_segments == 0


def test_a_session_may_open_only_so_many_caches(make_house: Callable[..., House]) -> None:
    client = make_house(settings=ServiceSettings(max_caches_per_session=2)).client()
    client.open(), client.open(salt="a")
    reply = client.ask(
        requests.OpenCache, "model", "raw/1", "", "", "b", 1, 1, 64, "float16", LAYOUT.block_tokens, LAYOUT.block_nbytes
    )
    assert error_code(reply) == "invalid-request"
    assert reply.message == "a session may open at most 2 caches; reuse one, or connect anew"
    assert client.open().cache == 1  # those it has stay open


def test_a_sequence_begins_is_sealed_and_found_by_the_next(house: House) -> None:
    writer, reader = house.client(), house.client()
    writer.open(), reader.open()
    prompt = names("a", "b", "c")
    first = writer.begin(prompt, 4)
    assert (first.cached, len(first.reserved), first.reply.num_announced) == ([], 4, 3)
    assert writer.seal(first.reserved[:3], prompt) == first.reserved[:3]
    second = reader.begin(prompt, 4, max_cached=2)
    assert second.cached == first.reserved[:2]
    assert len(second.reserved) == 2
    assert (second.reply.num_announced, second.reply.waited) == (0, False)
    assert reader.match(prompt) == 3


def test_a_reader_gets_read_only_descriptors_until_it_reserves(house: House) -> None:
    writer, reader = house.client(), house.client()
    writer.open(), reader.open()
    prompt = names("a", "b")
    writer.seal(writer.begin(prompt).reserved, prompt)
    assert writer.segments == {(0, 0): True}
    reader.begin(prompt)
    assert reader.segments == {(0, 0): False}
    assert [grant.message.nbytes for grant in reader.grants] == [16384]
    reader.begin(prompt)
    assert len(reader.grants) == 1  # granted once
    reserved_blocks(reader, reader.reserve(1))
    assert reader.segments == {(0, 0): True}
    assert len(writer.grants) == 1


def test_a_seal_brings_the_segment_of_the_block_that_was_there_first(house: House) -> None:
    one, two = house.client(), house.client()
    one.open(), two.open()
    (x,) = names("x")
    blocks = one.begin([x], 4).reserved  # the whole first segment
    (copy,) = two.begin([x], wait_s=0.0).reserved
    one.seal(blocks[:1], [x])
    assert two.segments == {(0, 1): True}
    assert two.seal([copy], [x]) == blocks[:1]
    assert two.segments == {(0, 1): True, (0, 0): False}


def test_a_sequence_over_several_segments_brings_a_grant_for_each(house: House) -> None:
    client = house.client()
    client.open()
    assert len(client.begin([], 7).reserved) == 7
    assert client.segments == {(0, 0): True, (0, 1): True}


def test_a_duplicate_seal_names_the_block_that_was_there_and_leaves_the_copy(house: House) -> None:  # case A10
    one, two = house.client(), house.client()
    one.open(), two.open()
    (x,) = names("x")
    (first,) = one.begin([x]).reserved
    (copy,) = two.begin([x], wait_s=0.0).reserved
    assert one.seal([first], [x]) == [first]
    assert two.seal([copy], [x]) == [first]
    # The copy is still the writer's own: nobody else is given it while tensors may lie over it.
    others = one.begin([], 6).reserved
    assert copy not in others
    assert error_code(one.release(reserved=[copy])) == "not-owned"
    expect(Done, two.release(blocks=[first], reserved=[copy]))
    assert reserved_blocks(one, one.reserve(1)) == [copy]


def test_what_is_not_held_is_neither_released_nor_sealed_and_nothing_changes(house: House) -> None:  # case B3
    one, two = house.client(), house.client()
    one.open(), two.open()
    x, y = names("x", "y")
    blocks = one.begin([x, y]).reserved
    one.seal(blocks[:1], [x])
    before = house.service.snapshot().pools
    for reply in (
        two.try_seal(blocks[1:], [y]),
        two.release(blocks[:1]),
        two.release(reserved=blocks[1:]),
        two.retain(blocks[:1]),
        one.release([blocks[0], blocks[0]]),
        one.release([999_999]),
        one.try_seal([blocks[0]], [y]),
    ):
        assert error_code(reply) == "not-owned"
    assert house.service.snapshot().pools == before
    expect(Done, one.release(blocks[:1]))
    assert error_code(one.release(blocks[:1])) == "not-owned"
    assert error_code(one.retain(blocks[:1])) == "not-owned"


def test_a_release_without_ack_is_silent_and_its_errors_are_counted(house: House) -> None:
    client = house.client()
    client.open()
    (block,) = client.begin([], 1).reserved
    assert client.release(reserved=[block], ack=False) is None
    assert client.release(reserved=[block], ack=False) is None
    assert house.service.snapshot().counters["failed_releases"] == 1


def test_a_fork_holds_its_own_references_and_reservations(house: House) -> None:
    client = house.client()
    client.open()
    prompt = names("a", "b")
    blocks = client.seal(client.begin(prompt).reserved, prompt)
    assert len(reserved_blocks(client, client.retain(blocks, 1))) == 1
    expect(Done, client.release(blocks))
    expect(Done, client.release(blocks))
    assert error_code(client.release(blocks)) == "not-owned"


def test_asking_pins_nothing(house: House) -> None:  # case B4
    client = house.client()
    client.open()
    old = names(*"abcdefgh")
    client.release(client.seal(client.begin(old).reserved, old))
    assert client.match(old) == 8
    assert len(client.begin(names(*"ijklmnop")).reserved) == 8  # all eight made room
    assert client.match(old) == 0


def test_what_a_request_found_is_not_evicted_for_what_it_reserves(house: House) -> None:  # case B5
    client = house.client()
    client.open()
    prompt = names(*"abcd")
    client.release(client.seal(client.begin(prompt).reserved, prompt))
    attached = client.begin(prompt, 8)
    assert len(attached.cached) == 4
    assert not set(attached.cached) & set(attached.reserved)
    assert error_code(client.try_begin(prompt, 9)) == "out-of-blocks"
    assert client.match(prompt) == 4


@pytest.mark.parametrize("num_blocks", [0, -1, 2**20 + 1, 2**63])
def test_absurd_numbers_of_blocks_are_refused(house: House, num_blocks: int) -> None:
    client = house.client()
    client.open()
    assert error_code(client.try_begin([], num_blocks)) == "invalid-request"
    assert error_code(client.reserve(num_blocks)) == "invalid-request"
    assert error_code(client.retain([], num_blocks or -1)) == "invalid-request"


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -0.1, 1e9])
def test_absurd_waits_are_refused(house: House, wait_s: float) -> None:
    client = house.client()
    client.open()
    assert error_code(client.try_begin(names("a"), wait_s=wait_s)) == "invalid-request"


def test_fields_that_do_not_fit_each_other_are_refused(house: House) -> None:
    client = house.client()
    client.open()
    a, b = names("a", "b")
    blocks = client.begin([a, b]).reserved
    for reply in (
        client.try_begin([a, b], 1),
        client.try_begin([a, b], 2, max_cached=3),
        client.try_begin([a, b], 2, max_cached=-1),
        client.ask(requests.Begin, 1, a + b"x", 1, 1),
        client.ask(requests.Seal, 1, pack(blocks), a),
        client.ask(requests.Seal, 1, b"123", a),
        client.try_seal(blocks, [a, b], bytes(8)),
    ):
        assert error_code(reply) == "invalid-request"
    assert client.seal(blocks, [a, b]) == blocks  # nothing of it had any effect


def test_an_unopened_cache_is_a_typed_error(house: House) -> None:
    client = house.client()
    for reply in (
        client.try_begin([], 1),
        client.reserve(1),
        client.retain([]),
        client.release(),
        client.try_seal([], []),
    ):
        assert error_code(reply) == "unknown-cache"


def test_ids_of_an_earlier_daemon_are_never_accepted(house: House) -> None:
    client = house.client()
    client.open()
    assert error_code(client.ask(requests.Reserve, 1, 1, epoch=6)) == "daemon-restarted"
    assert house.service.snapshot().clients[0].num_reserved == 0


def test_checksums_come_back_as_they_were_sealed(make_house: Callable[..., House]) -> None:
    sums = (2**64 - 1).to_bytes(8, "little") + (5).to_bytes(8, "little")
    for keep, expected in ((True, sums), (False, bytes(16))):
        house = make_house(settings=ServiceSettings(checksums=keep))
        client = house.client()
        client.open()
        prompt = names("a", "b")
        client.seal(client.begin(prompt).reserved, prompt, sums)
        assert client.begin(prompt, with_checksums=True).reply.checksums == expected
        assert client.begin(prompt).reply.checksums == b""


def test_a_session_that_reserves_everything_leaves_the_others_served(make_house: Callable[..., House]) -> None:
    house = make_house(4, session_quota_blocks=8)  # case B10
    greedy, modest = house.client(), house.client()
    greedy.open(), modest.open()
    while not isinstance(reply := greedy.reserve(1), Failed):
        pass
    assert reply.code == "quota-exceeded"
    assert error_code(greedy.try_begin([], 1, wait_s=30.0)) == "quota-exceeded"  # nobody else can end that wait
    assert len(modest.begin(names(*"abcdefgh")).reserved) == 8


def test_a_users_share_counts_over_all_its_sessions(make_house: Callable[..., House]) -> None:  # case B10
    house = make_house(4, uid_quota_blocks=8)
    one, two, other = house.client(uid=1), house.client(uid=1), house.client(uid=2)
    for client in (one, two, other):
        client.open()
    one.begin([], 6)
    assert error_code(two.try_begin([], 3)) == "quota-exceeded"
    other.begin([], 6)


def test_check_verifies_the_pools(house: House) -> None:
    client, admin = house.client(uid=1000), house.client(uid=0)
    client.open()
    client.begin(names("a"), 3)
    admin.check()
    assert error_code(client.ask(requests.Check)) == "permission-refused"
    assert error_code(client.ask(requests.Resize, 1 << 30)) == "permission-refused"


def test_status_counts_what_was_saved(house: House) -> None:
    client = house.client(uid=5, label="chat")
    client.open(salt="s")
    prompt = names("a", "b")
    client.seal(client.begin(prompt).reserved, prompt)
    client.begin(prompt)
    house.clock.now_s += 30
    snapshot = client.status().snapshot
    (seen,) = snapshot.clients
    assert (seen.session, seen.pid, seen.uid, seen.label) == (1, 4000, 5, "chat")
    assert (seen.connected_s, seen.tokens_saved, seen.num_references, seen.num_requests) == (30, 32, 4, 5)
    assert (snapshot.version, snapshot.pid, snapshot.uptime_s) == ("1.2.3", 99, 30)
    assert (snapshot.memory.used_nbytes, snapshot.memory.available_nbytes) == (16384, 123)
    (namespace,) = snapshot.namespaces
    assert (namespace.model, namespace.has_salt, namespace.counters["hits"]) == ("model", True, 2)
    assert snapshot.warnings == []
    assert house.service.control_counters()["num_hit_blocks"] == 2
    house.pools.all[0].drop_namespaces([client.digest])
    assert house.pools.forget_namespaces(set()) == [client.digest]
    assert house.service.control_counters()["num_hit_blocks"] == 2, "of a namespace that is forgotten too"


def test_every_request_of_the_protocol_has_its_method(house: House) -> None:
    assert set(house.service._verbs) == set(requests.Request.__args__)


def test_opened_replies_are_equal_for_equal_namespaces(house: House) -> None:
    one, two = house.client().open(), house.client().open()
    assert isinstance(one, CacheOpened)
    assert one.digest == two.digest


@pytest.mark.parametrize("verb", ["release", "retain", "try_seal"])
def test_a_list_of_blocks_that_would_hold_everybody_up_is_refused(house: House, verb: str) -> None:
    client = house.client()
    client.open()
    too_many = [0] * ((MAX_IDS_PER_RELEASE if verb == "release" else MAX_IDS_PER_MESSAGE) + 1)
    calls = {
        "release": lambda: client.release(too_many),
        "retain": lambda: client.retain(too_many),
        "try_seal": lambda: client.try_seal(too_many, []),
    }
    assert error_code(calls[verb]()) == "invalid-request"
    assert error_code(client.release([0] * MAX_IDS_PER_RELEASE)) == "not-owned"
