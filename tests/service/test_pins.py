"""Pinned prompts: held as soon as they are there, bounded, let go of by a flush, taken up again after a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.block import HOST
from kvd.hashing import pack_hashes
from kvd.mover import Lookup, Spill
from kvd.protocol import requests
from kvd.protocol.replies import Done, Failed, Flushed, Pinned
from kvd.service import Service, pins
from kvd.service.homes import Home
from kvd.service.pin_files import PinFiles
from kvd.status import PinStatus
from tests.service.harness import (
    BLOCK_NBYTES,
    EPOCH,
    SEGMENT_NBYTES,
    SETTINGS,
    Client,
    House,
    error_code,
    expect,
    names,
    reserved_blocks,
)
from tests.service.tiers import TieredHouse

PROMPT = names("a", "b", "c")


@pytest.fixture
def opened(house: House) -> Client:
    client = house.client(uid=1000)
    client.open()
    return client


def pin(client: Client, hashes=PROMPT, label: str = "manual") -> Pinned:
    return expect(Pinned, client.ask(requests.Pin, 1, pack_hashes(hashes), label))


def seen(client: Client) -> PinStatus:
    (found,) = client.status().snapshot.pins
    return found


def publish(client: Client, hashes) -> None:
    attached = client.begin(hashes)
    missing = hashes[len(attached.cached) :]
    blocks = attached.cached + (client.seal(attached.reserved, missing) if missing else [])
    client.release(blocks)


def test_a_pinned_prompt_is_never_evicted(house: House, opened: Client) -> None:
    publish(opened, PROMPT)
    assert (pin(opened).num_blocks, pin(opened).num_resident) == (3, 3)
    house.check()
    publish(opened, names("1", "2", "3", "4", "5"))  # a pool of eight
    publish(opened, names("6", "7", "8", "9"))
    assert opened.match(PROMPT) == 3
    assert (seen(opened).num_tokens_resident, seen(opened).held_nbytes) == (48, 3 * BLOCK_NBYTES)


def test_who_is_refused_a_block_is_told_of_the_pins(house: House, opened: Client) -> None:  # case B7
    publish(opened, PROMPT)
    pin(opened)
    refused = expect(Failed, opened.reserve(6))
    assert (refused.code, "and 3 by pinned prompts" in refused.message) == ("out-of-blocks", True)


def test_what_is_not_there_yet_is_held_from_the_moment_it_is_sealed(house: House, opened: Client) -> None:
    assert pin(opened).num_resident == 0
    publish(opened, PROMPT[:2])
    assert seen(opened).num_tokens_resident == 32
    publish(opened, PROMPT)
    assert seen(opened).num_tokens_resident == 48
    house.check()


def test_the_end_of_the_session_does_not_end_the_pin(house: House, opened: Client) -> None:
    publish(opened, PROMPT)
    pin(opened)
    opened.die()
    other = house.client()
    other.open()
    assert seen(other).num_tokens_resident == 48
    house.check()


def test_removing_it_lets_go(house: House, opened: Client) -> None:
    publish(opened, PROMPT)
    name = pin(opened).pin
    expect(Done, opened.ask(requests.Unpin, name))
    house.check()
    assert opened.status().snapshot.pins == []
    publish(opened, names(*"12345678"))
    assert opened.match(PROMPT) == 0
    assert error_code(opened.ask(requests.Unpin, name)) == "invalid-request"


def test_a_flush_takes_the_blocks_and_leaves_the_pin(house: House, opened: Client) -> None:  # case A9
    publish(opened, PROMPT)
    pin(opened)
    expect(Flushed, house.client(uid=0).ask(requests.Flush))
    house.check()
    assert opened.match(PROMPT) == 0
    assert house.pools.pool_statuses()[0].num_free == house.pools.all[0].store.capacity
    publish(opened, PROMPT)  # computed anew, it is held anew, and the old blocks are not
    assert seen(opened).num_tokens_resident == 48
    assert house.pools.pool_statuses()[0].num_references == 3


def test_the_same_prompt_is_the_same_pin(opened: Client) -> None:
    assert pin(opened).pin == pin(opened, label="again").pin
    assert len(opened.status().snapshot.pins) == 1


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (lambda client: client.ask(requests.Pin, 1, b""), "invalid-request"),
        (lambda client: client.ask(requests.Pin, 1, b"short"), "invalid-request"),
        (lambda client: client.ask(requests.Pin, 9, pack_hashes(PROMPT)), "unknown-cache"),
        (lambda client: client.ask(requests.Pin, 1, pack_hashes(names(*"abcde"))), "quota-exceeded"),  # 4 of 8 blocks
        (lambda client: client.ask(requests.Unpin, "../../etc/kvd"), "invalid-request"),
        (lambda client: client.ask(requests.Unpin, "0" * 12), "invalid-request"),
    ],
)
def test_what_cannot_be_pinned_or_unpinned(house: House, opened: Client, asked, code) -> None:
    assert error_code(asked(opened)) == code
    assert opened.status().snapshot.pins == []


def test_all_pins_together_have_a_limit(opened: Client) -> None:  # case B10
    pin(opened, names("a", "b"))
    pin(opened, names("x", "y"))
    assert error_code(opened.ask(requests.Pin, 1, pack_hashes(names("z")))) == "quota-exceeded"


def test_a_smaller_budget_leaves_room_beside_the_pins_and_a_larger_one_brings_them_back(
    house: House, opened: Client
) -> None:
    other = names("d")
    for hashes in (PROMPT, other):
        publish(opened, hashes)
        pin(opened, hashes)
    house.service.set_budget(SEGMENT_NBYTES)  # of eight blocks four are left, and two of those may be pinned
    held = {one.num_tokens: one.num_tokens_resident for one in opened.status().snapshot.pins}
    assert held == {48: 32, 16: 0}, "the older pin comes first"
    house.check()
    reserved = reserved_blocks(opened, opened.reserve(2))
    assert error_code(opened.reserve(1)) == "out-of-blocks"
    assert opened.match(PROMPT) == 2
    opened.release(reserved=reserved)
    house.service.set_budget(2 * SEGMENT_NBYTES)
    publish(opened, PROMPT)
    publish(opened, other)
    held = {one.num_tokens: one.num_tokens_resident for one in opened.status().snapshot.pins}
    assert held == {48: 48, 16: 16}
    house.check()


def test_a_user_has_a_limit_too() -> None:
    house = House(settings=replace(SETTINGS, uid_quota_nbytes=2 * BLOCK_NBYTES))
    one, other = house.client(uid=1), house.client(uid=2)
    one.open(), other.open()
    pin(one, names("a", "b"))
    assert error_code(one.ask(requests.Pin, 1, pack_hashes(names("c")))) == "quota-exceeded"
    pin(other, names("d"))
    house.close()


def test_no_user_takes_every_pin(house: House, monkeypatch: pytest.MonkeyPatch) -> None:  # case B10
    monkeypatch.setattr(pins, "MAX_PINS", 4)
    made = {}
    for uid in (1, 2, 3, 4):
        client = house.client(uid=uid)
        client.open()
        replies = [client.ask(requests.Pin, 1, pack_hashes(names(f"{uid}{word}"))) for word in "abc"]
        made[uid] = sum(isinstance(reply, Pinned) for reply in replies)
        assert {error_code(reply) for reply in replies if isinstance(reply, Failed)} == {"quota-exceeded"}
    assert made == {1: 2, 2: 1, 3: 1, 4: 0}


def test_only_its_user_and_the_administrator_may_remove_it(house: House) -> None:
    owner, other, admin = house.client(uid=1), house.client(uid=2), house.client(uid=0)
    owner.open(), other.open()
    name = pin(owner).pin
    assert error_code(other.ask(requests.Unpin, name)) == "permission-refused"
    expect(Done, admin.ask(requests.Unpin, name))


def test_another_tenant_does_not_learn_that_it_is_there() -> None:  # case F1
    house = House(settings=replace(SETTINGS, isolation="uid"))
    owner, other = house.client(uid=1), house.client(uid=2)
    owner.open(), other.open()
    assert error_code(other.ask(requests.Unpin, pin(owner).pin)) == error_code(other.ask(requests.Unpin, "0" * 12))
    house.close()


@pytest.fixture
def tiered() -> Iterator[TieredHouse]:
    house = TieredHouse()
    yield house
    house.close()


def test_it_is_brought_up_from_below_and_kept(tiered: TieredHouse) -> None:
    client = tiered.client()
    client.open()
    tiered.put_below(client, PROMPT)
    assert pin(client).num_resident == 0
    tiered.run_mover()
    assert seen(client).num_tokens_resident == 48
    tiered.check()


def test_a_tier_that_does_not_have_it_is_asked_less_and_less_often(tiered: TieredHouse) -> None:
    client = tiered.client()
    client.open()
    pin(client)
    num_asked = []
    for _ in range(2):
        before = tiered.mover.status().counters["lookups"]
        for _ in range(60):
            tiered.pass_time(0.5)
            tiered.run_mover()
        num_asked.append(tiered.mover.status().counters["lookups"] - before)
    assert num_asked[0] <= 6
    assert num_asked[1] <= 1
    assert not tiered.mover.waiting(Lookup)


def test_its_blocks_are_copied_down_at_once_whatever_the_policy(tiered: TieredHouse) -> None:
    client = tiered.client()
    client.open()
    pin(client)
    client.publish(PROMPT[:2])
    tiered.run_mover(Spill)
    assert tiered.held_below() == set(PROMPT[:2])


def test_a_clean_stop_lets_go_so_that_all_is_copied_down(tiered: TieredHouse) -> None:
    client = tiered.client()
    client.open()
    client.publish(PROMPT)
    pin(client)
    client.die()
    tiered.service.drain(lambda _seconds: tiered.run_mover() and None)
    assert tiered.held_below() == set(PROMPT)
    tiered.check()


def test_pins_outlive_the_service(tmp_path, tiered: TieredHouse) -> None:
    files = PinFiles(tmp_path / "pins")
    first = tiered.client()
    tiered.service.pins._files = files
    first.open(salt="secret")
    pinned = pin(first, label="a\x1bmanual\n")
    files.close()
    assert "secret" not in (tmp_path / "pins" / f"{pinned.pin}.pin").read_text()
    assert (tmp_path / "pins").stat().st_mode & 0o777 == 0o700

    again = PinFiles(tmp_path / "pins")
    later = Service(
        pools=tiered.pools,
        homes=[Home(HOST, tiered.stock)],
        epoch=EPOCH,
        settings=SETTINGS,
        pin_files=again,
        clock=tiered.clock,
    )
    (found,) = later.snapshot().pins
    assert (found.pin, found.label, found.num_tokens, found.is_lasting) == (pinned.pin, "amanual", 48, True)
    later.pins.unpin(tiered.service.sessions[first.session], pinned.pin)
    again.close()
    assert PinFiles(tmp_path / "pins").load() == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"pin": "x"}'])
def test_a_file_that_is_no_pin_is_left_alone(tmp_path, content, caplog) -> None:
    (tmp_path / "c0ffee123456.pin").write_bytes(content)
    files = PinFiles(tmp_path)
    assert files.load() == []
    files.close()
    assert "left alone" in caplog.text
    assert (tmp_path / "c0ffee123456.pin").exists()


def test_a_pin_whose_file_is_about_to_be_written_is_a_lasting_one(
    tmp_path, house: House, opened: Client, monkeypatch
) -> None:
    may_write = threading.Event()
    carry_out = PinFiles._carry_out
    monkeypatch.setattr(PinFiles, "_carry_out", lambda *args: may_write.wait(30) and carry_out(*args))
    files = house.service.pins._files = PinFiles(tmp_path / "pins")
    assert pin(opened).is_lasting is True
    assert seen(opened).is_lasting is True
    may_write.set()
    files.close()
    assert seen(opened).is_lasting is True


def test_a_full_disk_leaves_the_pin_in_memory(tmp_path, house: House, opened: Client, caplog) -> None:
    files = PinFiles(tmp_path / "pins")
    house.service.pins._files = files
    (tmp_path / "pins").rmdir()
    pin(opened)
    files.close()
    assert "is not kept on disk" in caplog.text
    assert seen(opened).is_lasting is False


def test_a_whole_pin_is_not_held_anew_for_what_others_seal(
    house: House, opened: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(opened, PROMPT)
    pin(opened)
    (pool,) = house.pools.all
    held: list[int] = []
    hold = pool.hold

    def counted_hold(hashes):
        held.append(len(hashes))
        return hold(hashes)

    monkeypatch.setattr(pool, "hold", counted_hold)
    publish(opened, names("1", "2"))
    publish(opened, names("3", "4", "5", "6"))  # evicts
    assert held == []
    pool.forget_corrupt(PROMPT[1])
    publish(opened, names("7"))
    assert held == [3]
    assert seen(opened).num_tokens_resident == 16
