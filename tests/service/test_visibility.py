"""With isolation by uid nobody sees another's names, hits, bytes or counters; root and the daemon's user see all."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvd.daemon.manager import status_line
from kvd.protocol import requests
from kvd.protocol.replies import Failed, Pinned
from kvd.service import ServiceSettings
from kvd.service import status as service_status
from kvd.status import Snapshot
from tests.cli.snapshots import HOST_TIER, REDIS_TIER
from tests.service.harness import BLOCK_NBYTES, SEGMENT_NBYTES, Client, House, expect, names, pack_hashes

ALICE, BOB, DAEMON = 1001, 1002, 990
BY_UID = ServiceSettings(isolation="uid", admin_uids=frozenset({0, DAEMON}))
TELLS_NOBODYS = frozenset({"version", "pid", "epoch", "uptime_s", "runtime_dir"})
"""Fields of a snapshot that are about the daemon alone; every tenant sees them as they are."""
CUT_TO_TENANT = frozenset({
    "memory", "memories", "pools", "namespaces", "num_namespaces_omitted", "clients", "counters", "warnings", "tiers",
    "tenant", "savings", "waits", "pins",
})  # fmt: skip
"""Fields that are cut to the tenant. What is in neither set, a new field for instance, no tenant sees."""


def busy(house: House, uid: int, model: str) -> Client:
    """A client of that user that has sealed one block of the model and found it once."""
    client = house.client(uid=uid, label=f"label of {uid}")
    client.open(model=model)
    (x,) = names(model)
    client.seal(client.begin([x]).reserved, [x])
    client.begin([x])
    return client


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house(4, settings=BY_UID)


def test_a_tenant_sees_its_own_and_nothing_of_another(house: House) -> None:  # case F1
    busy(house, ALICE, "secret-model")
    bob = busy(house, BOB, "model-of-bob")
    seen = bob.status().snapshot
    assert seen.tenant == f"uid:{BOB}"
    assert [one.tenant for one in seen.pools] == [f"uid:{BOB}"]
    assert [one.model for one in seen.namespaces] == ["model-of-bob"]
    assert [one.uid for one in seen.clients] == [BOB]
    assert seen.counters == {"requests": bob.latest}
    assert (seen.memory.used_nbytes, seen.memory.ready_nbytes) == (SEGMENT_NBYTES, 0)
    whole = msgspec.json.encode(seen).decode()
    for text in ("secret-model", str(ALICE)):
        assert text not in whole


def test_pins_waits_and_savings_are_a_tenants_own(house: House) -> None:  # case F1
    alice, bob = busy(house, ALICE, "secret-model"), busy(house, BOB, "model-of-bob")
    expect(Pinned, alice.ask(requests.Pin, 1, pack_hashes(names("secret-model")), "secret-label"))
    late = house.client(uid=ALICE)
    late.open(model="secret-model")
    wanted = names("later")
    alice.begin(wanted)
    assert late.try_begin(wanted, wait_s=60.0) is None
    seen, whole = bob.status().snapshot, house.service.snapshot()
    assert (len(whole.pins), len(whole.waits), whole.savings.num_tokens) == (1, 1, 32)
    assert (seen.pins, seen.waits, seen.savings.num_tokens) == ([], [], 16)
    own = alice.status().snapshot
    assert ([pin.label for pin in own.pins], own.savings.num_tokens) == (["secret-label"], 16)
    assert [(wait.writer, wait.waiting) for wait in own.waits] == [(alice.session, [late.session])]


def test_who_may_pin_no_more_does_not_learn_how_much_others_pinned(house: House) -> None:  # case F1
    alice, bob = busy(house, ALICE, "a"), busy(house, BOB, "b")
    expect(Pinned, alice.ask(requests.Pin, 1, pack_hashes(names(*"1234567"))))
    refused = expect(Failed, bob.ask(requests.Pin, 1, pack_hashes(names("x", "y"))))
    assert refused.code == "quota-exceeded"
    assert str(7 * BLOCK_NBYTES) not in refused.message


def test_what_others_do_changes_nothing_that_a_tenant_sees(house: House) -> None:  # case F1
    bob = busy(house, BOB, "model-of-bob")
    before = bob.status().snapshot
    for model in ("one", "two", "three"):
        busy(house, ALICE, model)
    after = bob.status().snapshot
    assert msgspec.structs.replace(after, counters=before.counters, clients=before.clients) == before


@pytest.mark.parametrize("uid", [0, DAEMON])
def test_root_and_the_daemons_user_see_all(house: House, uid: int) -> None:
    busy(house, ALICE, "a")
    busy(house, BOB, "b")
    seen = house.client(uid=uid).status().snapshot
    assert seen == house.service.snapshot()
    assert (seen.tenant, {one.model for one in seen.namespaces}) == ("", {"a", "b"})


def test_with_isolation_by_group_everybody_sees_all(make_house: Callable[..., House]) -> None:
    house = make_house(settings=ServiceSettings(shared_gid=50))
    busy(house, ALICE, "shared")
    seen = busy(house, BOB, "another").status().snapshot
    assert (seen.tenant, len(seen.clients)) == ("", 2)


def test_members_of_the_group_share_whatever_their_primary_groups(make_house: Callable[..., House]) -> None:
    house = make_house(settings=ServiceSettings(shared_gid=50))
    one, other = house.client(uid=ALICE, gid=ALICE), house.client(uid=BOB, gid=BOB)
    assert one.open().digest == other.open().digest
    (x,) = names("x")
    one.seal(one.begin([x]).reserved, [x])
    assert other.match([x]) == 1
    assert [pool.tenant for pool in one.status().snapshot.pools] == ["gid:50"]


def test_a_tenant_sees_which_tier_is_not_well_and_none_of_its_figures(house: House, monkeypatch) -> None:  # case F7
    class Below:
        statuses = staticmethod(lambda: [HOST_TIER, REDIS_TIER])
        mover_status = staticmethod(lambda: None)

    bob = busy(house, BOB, "b")
    monkeypatch.setattr(house.service, "below", Below())
    seen = service_status.snapshot(house.service, house.service.sessions[bob.session])
    monkeypatch.undo()
    assert [(one.name, one.state, one.reason) for one in seen.tiers] == [
        (one.name, one.state, one.reason) for one in (HOST_TIER, REDIS_TIER)
    ]
    for tier in seen.tiers:
        assert (tier.num_found, tier.num_puts, tier.read_nbytes, tier.errors, tier.usage) == (0, 0, 0, {}, None)
    assert seen.warnings == [f"The redis tier is down, memory serves on: {REDIS_TIER.reason}"]


def test_the_line_for_the_service_manager_counts_nothing_behind_walls(make_house: Callable[..., House]) -> None:
    """Every user of the machine can read it."""
    walled, shared = make_house(4, settings=BY_UID), make_house(4)
    for house in (walled, shared):
        busy(house, ALICE, "secret-model")
    assert status_line(walled.service) == "serving /run/kvd"
    assert status_line(shared.service) == "serving /run/kvd: 1 session, 0 of 0 MiB in pools"


def test_every_field_of_a_snapshot_is_judged() -> None:
    """What is new stays hidden from tenants until it is named in one of the two sets and in `of_tenant`.

    `mover` counts over all tenants: nobody's own.
    """
    assert set(Snapshot.__struct_fields__) == TELLS_NOBODYS | CUT_TO_TENANT | {"mover"}


def test_a_snapshot_names_only_the_namespaces_with_most_blocks(house: House, monkeypatch) -> None:  # case B10
    monkeypatch.setattr(service_status, "MAX_NAMESPACES", 3)
    alice, bob = house.client(uid=ALICE), busy(house, BOB, "of bob")
    for index in range(5):
        alice.open(model=f"model {index}")
    busy(house, ALICE, "model 4")
    seen = alice.status().snapshot
    assert (len(seen.namespaces), seen.num_namespaces_omitted) == (3, 2)
    assert seen.namespaces[-1].model == "model 4" or seen.namespaces[0].model == "model 4"
    assert bob.status().snapshot.num_namespaces_omitted == 0
    everything = house.service.snapshot()
    assert (len(everything.namespaces), everything.num_namespaces_omitted) == (3, 3)
