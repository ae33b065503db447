"""Users of one service, as the kernel knows them: who may connect, who sees what, and who may not spoil it for others.

alice and bob are members of the service's group, each with a primary group of her and his own; mallory is not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from tests.support.wait import eventually
from tests.system.actor import ActorProcess, actor
from tests.system.machine import Machine
from tests.system.service import UNIT, ServiceUnderTest

NAMES = [f"block {index}" for index in range(8)]
LIMITS = "[limits]\nuid_sessions = 3\nuid_requests = 96\nuid_nbytes = 8388608\n"


@pytest.fixture(scope="module")
def service(machine: Machine) -> ServiceUnderTest:
    service = ServiceUnderTest(machine)
    service.install()
    for name, groups in (("alice", ["kvd"]), ("bob", ["kvd"]), ("mallory", [])):
        machine.add_user(name, *groups)
    return service


@pytest.fixture(scope="module")
def shared(service: ServiceUnderTest) -> ServiceUnderTest:
    """Isolation by group, the default."""
    service.configure(LIMITS)
    service.restart()
    return service


@pytest.fixture(scope="module")
def walled(service: ServiceUnderTest) -> ServiceUnderTest:
    """Isolation by uid."""
    service.configure('[access]\nisolation = "uid"\n')
    service.restart()
    return service


@contextlib.contextmanager
def client_of(machine: Machine, user: str, *, connects: bool = True) -> Iterator[ActorProcess]:
    with actor(machine.prefix(user), connects=connects) as client:
        yield client


def secrets_of(pid: int) -> list[str]:
    return [f"/proc/{pid}/{name}" for name in ("mem", "environ", "maps", "fd", "fd/0")]


def test_who_is_not_in_the_group_cannot_connect(machine, shared):  # case F1
    with client_of(machine, "mallory", connects=False) as mallory:
        assert mallory.do("connect") == {"code": "permission-refused"}
        assert set(mallory.do("open", paths=["/run/kvd", "/var/lib/kvd", "/run/kvd/kvd.lock"]).values()) == {"EACCES"}
    done = machine.kvd("status", user="mallory", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    with client_of(machine, "alice") as alice:
        assert alice.do("who")["uid"] == int(machine.ask("id", "-u", "alice"))


@pytest.mark.parametrize("user", ["mallory", "bob", "kvd"])
def test_nobody_reads_the_daemons_memory(machine, shared, user):  # case F1
    """Not even another process of the service's own user."""
    pid = shared.main_pid
    with client_of(machine, user, connects=False) as other:
        assert set(other.do("open", paths=secrets_of(pid)).values()) == {"EACCES"}
        assert other.do("read_memory", pid=pid, address=0) == {"vm": "EPERM", "ptrace": "EPERM"}


@pytest.mark.parametrize("user", ["mallory", "bob", "kvd"])
def test_no_other_user_reads_a_clients_memory_or_takes_its_descriptors(machine, shared, user):  # case F1
    with client_of(machine, "alice") as alice, client_of(machine, user, connects=False) as other:
        alice.do("seal", model="m", names=NAMES)
        pid, paths = alice.do("who")["pid"], alice.do("descriptors")["paths"]
        assert len(paths) >= 2
        assert set(other.do("open", paths=[*secrets_of(pid), *paths]).values()) == {"EACCES"}
        assert other.do("read_memory", pid=pid, address=0) == {"vm": "EPERM", "ptrace": "EPERM"}


def test_a_reader_of_the_group_cannot_write(machine, shared):  # case D3
    with client_of(machine, "alice") as alice, client_of(machine, "bob") as bob:
        alice.do("seal", model="shared", names=NAMES)
        assert bob.do("seal", model="shared", names=NAMES) == {"num_cached": len(NAMES)}
        refused = bob.do("reopen_writable")
        assert len(refused) >= 2
        assert set(refused.values()) == {"EACCES"}


def test_a_token_is_worth_nothing_to_another_user(machine, shared):  # case F2
    with client_of(machine, "alice") as alice, client_of(machine, "bob") as bob:
        assert bob.do("use_token", **alice.do("token")) == {"answered": False}
        assert alice.do("use_token", **alice.do("token"))["answered"] in {True, False}
        assert alice.do("match", model="m", names=NAMES)["num_resident"] >= 0


def test_what_a_client_calls_itself_changes_nothing(machine, shared):  # case F2
    with client_of(machine, "bob", connects=False) as bob:
        assert bob.do("connect", label="uid=0 pid=1 root") == {"code": ""}
        assert bob.do("ask", request="Check") == {"code": "permission-refused"}
        (seen,) = [one for one in bob.do("status")["clients"] if one["label"].startswith("uid=0")]
        assert (seen["uid"], seen["pid"]) == (bob.do("who")["uid"], bob.do("who")["pid"])


@pytest.mark.parametrize("user", ["alice", "root", "kvd"])
def test_administration_is_for_root_and_the_services_user(machine, shared, user):  # case F1
    code = "permission-refused" if user == "alice" else ""
    with client_of(machine, user) as client:
        assert client.do("ask", request="Check") == {"code": code}
        assert client.do("ask", request="Spill") == {"code": code}
    done = machine.kvd("flush", "--all", user=user, check=False)
    assert done.returncode == (4 if code else 0), done.stderr


def test_a_user_who_takes_all_there_is_leaves_the_others_theirs(machine, shared):  # case B10
    with client_of(machine, "bob") as bob, client_of(machine, "alice") as alice:
        greedy = bob.do("reserve_all")
        assert greedy["code"] == "quota-exceeded"
        assert greedy["num_blocks"] * 4096 <= 8 << 20
        # Two more of his; the fourth is refused, and alice's is not.
        assert bob.do("connect_often", num_sessions=4) == {"num_welcome": 2}
        with client_of(machine, "alice") as second:
            assert second.do("seal", model="of alice", names=NAMES)["num_cached"] in {0, len(NAMES)}
        assert alice.do("match", model="of alice", names=NAMES) == {"num_resident": len(NAMES)}


def test_floods_of_a_user_leave_the_others_served(machine, shared):  # case B10
    with client_of(machine, "bob") as one, client_of(machine, "bob") as two, client_of(machine, "alice") as alice:
        for flooder in (one, two):
            flooder.begin("flood", num_requests=30_000)
        for _ in range(50):
            assert alice.do("match", model="m", names=NAMES)["num_resident"] >= 0
        for flooder in (one, two):
            flooder.result()
        alice.do("seal", model="after the flood", names=NAMES)
    with client_of(machine, "root") as root:
        assert root.do("ask", request="Check") == {"code": ""}


@pytest.mark.parametrize(("user", "code"), [("root", 8), ("kvd", 9)])
def test_a_second_daemon_is_refused_and_the_first_unharmed(machine, shared, user, code):  # case F6
    """Root is kept out even earlier: by whose folder it is."""
    before = shared.main_pid
    flags = ("--runtime-dir", "/run/kvd", "--tiers-redis-url", "off", "--memory-budget", "4MiB")
    done = machine.kvd("serve", *flags, user=user, check=False)
    assert done.returncode == code, done.stderr
    assert ("another daemon" in done.stderr) is (code == 9)
    assert done.stderr.count("\n") == 1
    with client_of(machine, "alice") as alice:
        assert alice.do("match", model="m", names=[])["num_resident"] == 0
    assert (shared.main_pid, shared.is_active) == (before, True)


def test_status_answers_while_the_tier_is_frozen_and_says_which(machine, shared):  # case F7
    with client_of(machine, "alice") as alice:
        (valkey,) = [line.split()[0] for line in shared.processes() if "valkey-server" in line]
        machine.run("kill", "-STOP", valkey)
        try:
            # What must ask the tier finds out that nobody answers; status never asks it.
            cold = (f"cold {number}" for number in range(1000))
            alice.do("match", model="m", names=[next(cold)])
            eventually(lambda: _is_down(alice, next(cold)), 30)
            page = machine.kvd("status", user="alice").stdout
            assert "redis  down" in page
            assert "! The redis tier is down" in page
        finally:
            machine.run("kill", "-CONT", valkey)
        eventually(lambda: not _is_down(alice, next(cold)), 60)


def _is_down(client: ActorProcess, cold: str) -> bool:
    client.do("match", model="m", names=[cold])
    (tier,) = client.do("status")["tiers"]
    return tier["state"] == "down"


def test_behind_walls_another_user_sees_neither_hits_nor_bytes_nor_names(machine, walled):  # case F1
    with client_of(machine, "alice", connects=False) as alice, client_of(machine, "bob") as bob:
        alice.do("connect", label="label-of-alice")
        alice.do("seal", model="model-of-alice", names=NAMES)
        assert alice.do("seal", model="model-of-alice", names=NAMES) == {"num_cached": len(NAMES)}
        assert bob.do("seal", model="model-of-bob", names=["of bob"]) == {"num_cached": 0}
        uid_of_alice = alice.do("who")["uid"]

        seen = bob.do("status")
        assert {client["uid"] for client in seen["clients"]} == {bob.do("who")["uid"]}
        assert [pool["tenant"] for pool in seen["pools"]] == [f"uid:{bob.do('who')['uid']}"]
        for argv in (("status",), ("status", "--json")):
            page = machine.kvd(*argv, user="bob").stdout
            assert "model-of-bob" in page
            for text in ("model-of-alice", "label-of-alice", f"uid:{uid_of_alice}"):
                assert text not in page
        page = json.loads(machine.kvd("status", "--json", user="root").stdout)
        assert {one["model"] for one in page["namespaces"]} >= {"model-of-alice", "model-of-bob"}
        assert "model-of-alice" in machine.kvd("status", user="kvd").stdout

        # The same name is another namespace, which has none of her blocks.
        assert bob.do("match", model="model-of-alice", names=NAMES) == {"num_resident": 0}
        digest = next(one["digest"] for one in page["namespaces"] if one["model"] == "model-of-alice")
        assert machine.kvd("flush", "--namespace", digest, user="bob", check=False).returncode == 4
        machine.kvd("flush", "--all", user="bob")
        assert alice.do("match", model="model-of-alice", names=NAMES) == {"num_resident": len(NAMES)}


def test_behind_walls_no_secret_is_in_the_journal(machine, walled):
    """The journal of a service is for administrators, but names of models and labels are not for the log at all."""
    assert "of-alice" not in machine.journal(UNIT)
    assert walled.properties("StatusText") == {"StatusText": "serving /run/kvd"}


def test_behind_walls_the_redis_socket_is_for_the_service_alone(machine, walled):  # case F1
    paths = ["/run/kvd/redis.sock", "/run/kvd/redis.log"]
    for path in paths:
        assert machine.ask("stat", "-c", "%A", path)[4:] == "------", path
    with client_of(machine, "bob") as bob:
        assert "EACCES" in bob.do("open", paths=["/run/kvd/redis.log"]).values()
