"""A host pool beside a card: copies between the two, in every order, over the fake driver and a mover run by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from kvd.block import BlockId, ChainHash
from kvd.cuda import Driver, pid_namespace
from kvd.hashing import pack_hashes
from kvd.memory import CardMemory
from kvd.mover import Carry, Fill, Lookup, Spill
from kvd.protocol import requests
from kvd.protocol.replies import Begun, Flushed
from kvd.service.homes import Card, Home
from tests.cuda.conftest import machine  # noqa: F401 - a fixture
from tests.fakecuda.machine import MIB, FakeMachine
from tests.service.harness import Attached, error_code, expect, names
from tests.service.tiers import TieredClient, TieredHouse, content
from tests.support.wait import eventually

PROMPT = names("a", "b", "c")


class OnCard(TieredClient):
    def may_map(self, blocks: object, *, writable: bool = False) -> None:
        """Of a card: one grant is good for all of a segment, which is checked where it comes."""


class StagedHouse(TieredHouse):
    def __init__(self, memory: CardMemory, **more: object) -> None:
        card = Home(memory.device.uuid, memory, Card(memory, memory.device, pid_namespace()))
        super().__init__(1, card=card, client_type=TieredClient, **more)  # type: ignore[arg-type]
        self.memory = memory

    def on_card(self) -> TieredClient:
        self._client_type = OnCard
        client = self.client()
        self._client_type = TieredClient
        client.open()
        return client

    def filled(self, prompt: Sequence[ChainHash]) -> TieredClient:
        """Somebody has computed that on the card, and nothing is under way any more."""
        client = self.on_card()
        client.publish(prompt)
        self.run_mover(Lookup)
        return client

    def staged(self) -> TieredClient:
        client = self.client()
        opened = client.open(staged=True)
        assert (opened.device, opened.staged_from) == ("host", self.memory.device.uuid)
        return client

    def check(self) -> None:
        super().check()
        assert (
            not any(pool.num_in_transit for pool in self.pools.all)
            or any(self.mover.waiting(kind) or self.mover.running(kind) for kind in (Carry, Fill, Spill))
            or self.mover.has_done
        ), "a block is held for a copy that nobody makes"


@pytest.fixture
def house(machine: FakeMachine) -> Iterator[StagedHouse]:  # noqa: F811
    driver = Driver()
    memory = CardMemory(driver, driver.devices[0], decide=lambda _free, _total: (2 * MIB, 2 * MIB), prefault="lazy")
    memory.open()
    house = StagedHouse(memory)
    yield house
    house.mover_done()
    house.check()
    house.close()
    memory.close()
    assert machine.held_nbytes() == 0


def attached(client: TieredClient, request_id: int | None = None) -> Attached:
    return Attached(client, expect(Begun, client.answer(request_id)))


def test_a_begin_waits_for_what_the_card_has(house: StagedHouse) -> None:
    house.filled(PROMPT)
    client = house.staged()
    assert client.try_begin(PROMPT, 4) is None
    carries = house.mover.waiting(Carry)
    assert len(carries) == 3
    assert not house.mover.waiting(Lookup), "there is nothing left to ask the tiers for"
    # Whichever is through first.
    house.do(*reversed(carries))
    begun = attached(client)
    assert begun.reply.num_cached == 3
    client.verify(begun, PROMPT)


def test_only_what_follows_is_asked_for_below(house: StagedHouse) -> None:
    on_card = house.filled(PROMPT[:2])
    house.put_below(on_card, PROMPT[2:])
    client = house.staged()
    assert client.try_begin(PROMPT, 4, wait_s=5.0) is None
    (lookup,) = house.mover.waiting(Lookup)
    assert [key.chain_hash for key in lookup.keys] == PROMPT[2:]
    house.run_mover()
    begun = attached(client)
    assert begun.reply.num_cached == 3
    client.verify(begun, PROMPT)


@pytest.mark.parametrize("end_first", [True, False])
def test_the_end_of_who_waits(house: StagedHouse, end_first: bool) -> None:  # case B11
    house.filled(PROMPT)
    client = house.staged()
    client.try_begin(PROMPT, 4)
    first, second, third = house.mover.waiting(Carry)
    house.mover.begin(first)
    house.mover.do(second)
    if end_first:
        client.die()
    house.mover.end(first)
    house.mover_done()
    if not end_first:
        client.die()
    assert third.cancelled or third.error is None
    house.mover_done()
    assert all(pool.store.num_references == 0 for pool in house.pools.all), "every hold has ended"
    house.service.pools.check_integrity()


def test_two_who_wait_share_one_copy(house: StagedHouse) -> None:
    house.filled(PROMPT)
    one, two = house.staged(), house.staged()
    assert one.try_begin(PROMPT, 3) is None
    assert two.try_begin(PROMPT, 3) is None
    assert len(house.mover.waiting(Carry)) == 3
    house.run_mover()
    for client in (one, two):
        assert attached(client).reply.num_cached == 3


def test_what_is_copied_stays_on_the_card_until_it_is(house: StagedHouse) -> None:
    on_card = house.on_card()
    blocks = on_card.publish(PROMPT)
    house.run_mover(Lookup)
    client = house.staged()
    client.try_begin(PROMPT, 4)
    (carry, *_) = house.mover.waiting(Carry)
    house.mover.begin(carry)
    # The whole card is wanted for something else meanwhile.
    taken = on_card.begin([], 512 - 3, wait_s=0.0)
    assert on_card.try_begin([], 1, wait_s=0.0) is None or error_code(on_card.answer()) == "out-of-blocks"
    assert not set(taken.reserved) & set(blocks)
    house.mover.end(carry)
    house.run_mover(Carry)
    client.verify(attached(client, 2), PROMPT)


def test_a_flush_while_it_is_copied(house: StagedHouse) -> None:  # case A9
    house.filled(PROMPT)
    client = house.staged()
    assert client.try_begin(PROMPT, 4) is None
    (carry, *_) = house.mover.waiting(Carry)
    house.mover.begin(carry)
    admin = house.client(uid=0)
    assert admin.ask(requests.Flush) is None
    house.mover.end(carry)
    house.run_mover()
    assert expect(Flushed, admin.answer()).num_namespaces == 1
    assert attached(client).reply.num_cached == 0


def test_a_block_of_the_card_that_is_not_what_was_sealed(house: StagedHouse) -> None:
    on_card = house.on_card()
    begun = on_card.begin(PROMPT, wait_s=0.0)
    for block, chain_hash in zip(begun.reserved, PROMPT, strict=True):
        house.write(on_card, block, content(chain_hash))
    on_card.seal(begun.reserved, PROMPT, (12345).to_bytes(8, "little") * 3)
    client = house.staged()
    client.try_begin(PROMPT, 4)
    house.run_mover()
    assert attached(client).reply.num_cached == 0
    assert on_card.match(PROMPT) == 0, "nobody finds it on the card any more"


def test_what_is_sealed_beside_goes_to_the_card(house: StagedHouse) -> None:
    client = house.staged()
    blocks = client.publish(PROMPT, keep=True)
    carries = house.mover.waiting(Carry)
    assert len(carries) == 3
    # Its writer ends in the middle of it; the copies hold their own references.
    house.mover.begin(carries[0])
    client.die()
    house.mover.end(carries[0])
    house.run_mover()
    assert house.service.counters["written_back"] == 3
    on_card = house.on_card()
    begun = on_card.begin(PROMPT)
    assert len(begun.cached) == 3
    on_card.verify(begun, PROMPT)
    assert len(blocks) == 3


def test_a_seal_on_the_card_is_faster_than_the_copy(house: StagedHouse) -> None:
    client, on_card = house.staged(), house.on_card()
    client.publish(PROMPT)
    (carry, *_) = house.mover.waiting(Carry)
    house.mover.begin(carry)
    begun = on_card.begin([], 3, wait_s=0.0)
    for block, chain_hash in zip(begun.reserved, PROMPT, strict=True):
        house.write(on_card, block, content(chain_hash))
    standing = on_card.seal(begun.reserved, PROMPT)
    assert standing == begun.reserved
    house.mover.end(carry)
    house.run_mover()
    assert on_card.match(PROMPT) == 3
    card_pool = house.pools.get(on_card.pool)
    assert (card_pool.store.num_sealed, card_pool.store.num_filling) == (3, 0)


def test_what_the_card_has_already_is_not_copied_back(house: StagedHouse) -> None:
    house.filled(PROMPT)
    client = house.staged()
    begun = client.begin([], 3, wait_s=0.0)
    for block, chain_hash in zip(begun.reserved, PROMPT, strict=True):
        house.write(client, block, content(chain_hash))
    client.seal(begun.reserved, PROMPT)
    assert not house.mover.waiting(Carry)
    assert house.service.counters["written_back_twice"] == 3


def test_a_lost_mover_thread_is_a_failed_copy(house: StagedHouse) -> None:
    house.filled(PROMPT)
    client = house.staged()
    client.try_begin(PROMPT, 4)
    for carry in house.mover.waiting(Carry):
        house.mover.lose(carry)
    house.mover_done()
    assert attached(client).reply.num_cached == 0


def test_a_match_counts_what_the_card_has(house: StagedHouse) -> None:
    house.filled(PROMPT[:2])
    client = house.staged()
    house.put_below(client, PROMPT[2:])
    reach = client.reach(PROMPT)
    assert (reach.num_resident, reach.reach) == (2, [3])
    assert client.ask(requests.Match, 1, pack_hashes(PROMPT[:1])) is not None


def test_a_staged_begin_waits_for_what_is_computed_on_the_card(house: StagedHouse) -> None:
    on_card = house.filled(PROMPT[:1])
    begun = on_card.begin(PROMPT, wait_s=0.0)
    client = house.staged()
    assert client.try_begin(PROMPT, 4) is None
    assert not house.mover.waiting(Carry), "who waits for another session holds nothing"
    (wait,) = on_card.status().snapshot.waits
    assert (wait.what, wait.pool, wait.hash, wait.writer) == (
        "computation",
        on_card.pool,
        PROMPT[1].hex(),
        on_card.session,
    )
    for place, chain_hash in enumerate(PROMPT[1:]):
        assert client.answer() is None
        house.write(on_card, begun.reserved[place], content(chain_hash))
        on_card.seal(begun.reserved[place : place + 1], [chain_hash])
    house.run_mover()
    attached_to = attached(client)
    assert (attached_to.reply.num_cached, attached_to.reply.waited) == (3, True)
    client.verify(attached_to, PROMPT)


def test_a_begin_on_the_card_waits_for_what_is_computed_beside(house: StagedHouse) -> None:
    client = house.staged()
    begun = client.begin(PROMPT, wait_s=0.0)
    on_card = house.on_card()
    assert on_card.try_begin(PROMPT, 4) is None
    house.run_mover()
    assert on_card.answer() is None, "no tier's answer is waited for"
    for block, chain_hash in zip(begun.reserved, PROMPT, strict=True):
        house.write(client, block, content(chain_hash))
    client.seal(begun.reserved, PROMPT)
    house.run_mover()
    attached_to = attached(on_card)
    assert attached_to.reply.num_cached == 3
    on_card.verify(attached_to, PROMPT)


@pytest.mark.parametrize("computes_on_card", [True, False])
@pytest.mark.parametrize("how", ["dies", "gives up", "takes too long"])
def test_who_waits_for_the_other_side_computes_when_that_ends(
    house: StagedHouse, computes_on_card: bool, how: str
) -> None:
    writer = house.on_card() if computes_on_card else house.staged()
    waiting = house.staged() if computes_on_card else house.on_card()
    begun = writer.begin(PROMPT, wait_s=0.0)
    assert waiting.try_begin(PROMPT, 4, wait_s=5.0) is None
    house.run_mover()
    assert waiting.answer() is None, "no tier's answer is waited for"
    if how == "dies":
        writer.die()
    elif how == "gives up":
        writer.release(reserved=begun.reserved, hashes=PROMPT)
    else:
        house.pass_time(5.0)
    house.run_mover()
    assert attached(waiting).reply.num_cached == 0
    # The next one waits for this one now, wherever it is.
    third = house.staged()
    assert third.try_begin(PROMPT, 4) is None
    house.run_mover()
    assert third.answer() is None
    waiting.die()
    house.run_mover()
    if how == "takes too long":
        writer.die()
        house.run_mover()
    assert attached(third).reply.num_cached == 0


def test_nobody_waits_for_a_card_that_is_lost(house: StagedHouse, machine: FakeMachine) -> None:  # noqa: F811
    house.on_card().begin(PROMPT, wait_s=0.0)
    before = house.staged()
    assert before.try_begin(PROMPT, 4) is None
    machine.lose_card(0)
    house.memory.available_nbytes()
    eventually(lambda: house.memory.lost)
    house.memory_ready()
    house.run_mover()
    assert attached(before).reply.num_cached == 0


def test_a_card_that_is_lost_holds_up_no_copies_of_other_pools(machine: FakeMachine) -> None:  # noqa: F811
    driver = Driver()
    with contextlib.ExitStack() as ends:
        memory = CardMemory(driver, driver.devices[0], decide=lambda _free, _total: (2 * MIB, 2 * MIB), prefault="lazy")
        ends.callback(memory.close)
        memory.open()
        house = StagedHouse(memory, spill="write_through")
        ends.callback(house.close)
        house.on_card().publish(PROMPT)
        machine.lose_card(0)
        house.run_mover()
        assert memory.lost
        assert house.mover.status().counters["failed_spills"] == 3, "of a lost card nothing is copied twice"
        client = house.client()
        client.open(device="host")
        client.publish(names("x", "y", "z"))
        house.run_mover()
        assert house.held_below() == set(names("x", "y", "z")), "at once, without a rest"


def test_who_computes_itself_is_told_that_it_would_wait_for_the_other_side(house: StagedHouse) -> None:
    house.on_card().begin(PROMPT, wait_s=0.0)
    client = house.staged()
    client.begin(names("own"), wait_s=0.0)
    assert error_code(client.try_begin(PROMPT, 4)) == "would-wait"
    # Its own announcement on the other side is no reason to wait.
    both = house.on_card()
    both.begin(names("mine"), wait_s=0.0)
    assert both.open(staged=True).staged_from
    assert both.try_begin(names("mine"), 1, cache=2, wait_s=5.0) is None
    house.run_mover()
    assert attached(both).reply.num_cached == 0


def test_ids_of_both_pools_are_told_apart(house: StagedHouse) -> None:
    on_card, client = house.on_card(), house.staged()
    assert on_card.pool != client.pool
    blocks = on_card.publish(PROMPT, keep=True)
    assert error_code(client.release(blocks=[BlockId(block) for block in blocks])) == "not-owned"
