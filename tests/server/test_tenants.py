"""The wall between users of one daemon, with real processes of real uids."""

from __future__ import annotations

import pytest

from kvd.protocol.control_page import ControlPageReader
from kvd.protocol.replies import Failed
from kvd.protocol.requests import Check, Flush, Match, Spill
from kvd.status import Snapshot
from tests.support.daemon import running_daemon
from tests.support.open_place import open_doors, open_place
from tests.support.raw_client import RawClient, hashes, totals
from tests.support.unprivileged import NOBODY, as_nobody
from tests.support.wait import eventually


def seals(raw: RawClient, model: str, *names: str) -> None:
    packed = hashes(*names)
    cache = raw.open_cache(model)
    raw.seal(cache, raw.begin(cache, packed, num_blocks=len(names)).blocks, packed)


@pytest.fixture
def place():
    with open_place() as place:
        yield place


@pytest.fixture
def walled(place):
    with running_daemon(place, access={"isolation": "uid"}) as daemon:
        open_doors(daemon)
        yield daemon


def test_another_user_finds_neither_blocks_nor_names_nor_counts(walled):  # case F1
    with RawClient(walled.folder, label="the label of root") as raw:
        seals(raw, "secret-model", "a", "b")

        def sees_nothing() -> bool:
            with RawClient(walled.folder) as other:
                cache = other.open_cache("secret-model")
                assert other.ask(Match, cache, hashes("a", "b")).num_resident == 0
                assert other.begin(cache, hashes("a", "b"), num_blocks=2).num_cached == 0
                seen: Snapshot = other.status()
                assert seen.tenant == f"uid:{NOBODY}"
                assert [pool.tenant for pool in seen.pools] == [f"uid:{NOBODY}"]
                assert [client.uid for client in seen.clients] == [NOBODY]
                assert [one.counters["hits"] for one in seen.namespaces] == [0]
                assert "the label of root" not in repr(seen)
            return True

        assert as_nobody(sees_nothing)
        assert {client.uid for client in raw.status().clients} >= {0}
        raw.check()


def test_the_control_page_counts_for_nobody_behind_walls(tmp_path, walled):  # case F1
    with running_daemon(tmp_path, name="open") as open_daemon:
        for daemon, is_public in ((open_daemon, True), (walled, False)):
            with RawClient(daemon.folder) as raw:
                seals(raw, "m", "a")
                with ControlPageReader(raw.descriptors[0]) as page:
                    if is_public:
                        eventually(lambda page=page: page.read().counters["num_requests"] > 0)
                    else:
                        before = page.read().heartbeat_s
                        # Two heartbeats after the counters are next summed up.
                        eventually(lambda page=page, before=before: page.read().heartbeat_s > before + 2.5)
                        assert set(page.read().counters.values()) == {0}


@pytest.mark.parametrize("isolation", ["group", "uid"])
def test_who_is_neither_root_nor_the_daemons_user_administers_nothing_of_others(place, isolation):  # case F1
    with running_daemon(place, access={"isolation": isolation}) as daemon, RawClient(daemon.folder) as raw:
        open_doors(daemon)
        seals(raw, "m", "a", "b")
        digest = bytes.fromhex(raw.status().namespaces[0].digest)

        def is_refused() -> bool:
            with RawClient(daemon.folder) as other:
                asked = [other.ask(Check), other.ask(Flush, digest), other.ask(Spill)]
                assert [one.code for one in asked if isinstance(one, Failed)] == ["permission-refused"] * len(asked)
                # By name it means what is its own: with isolation by group nothing is, by uid it has nothing yet.
                by_name = other.ask(Flush, b"", "m")
                assert isinstance(by_name, Failed) if isolation == "group" else by_name.num_blocks == 0
            return True

        assert as_nobody(is_refused)
        assert totals(raw.status())[0] == 2
