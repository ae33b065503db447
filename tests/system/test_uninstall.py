"""What `kvd uninstall` leaves: nothing; and a user's own service."""

from __future__ import annotations

import pytest

from tests.support.wait import eventually
from tests.system.actor import actor
from tests.system.machine import Machine
from tests.system.service import UNIT, ServiceUnderTest

PLACES = ("/etc", "/usr", "/var", "/home", "/opt", "/root", "/run/systemd/system", "/run/user")
NOT_OURS = ("/var/log/", "/var/lib/systemd/", "/var/cache/", "/etc/.pwd.lock", "/var/lib/dbus")


def files(machine: Machine) -> set[str]:
    found = machine.ask("find", *PLACES, "-xdev").splitlines()
    return {path for path in found if not path.startswith(NOT_OURS)}


@pytest.fixture
def clean(machine: Machine) -> Machine:
    machine.kvd("uninstall", check=False)
    machine.run("rm", "-rf", "/etc/kvd", "/run/systemd/system/kvd.service.d")
    return machine


def test_uninstall_leaves_nothing(clean):
    before, users = files(clean), clean.ask("getent", "passwd") + clean.ask("getent", "group")
    service = ServiceUnderTest(clean)
    service.install()
    with actor(clean.prefix()) as client:
        client.do("seal", model="m", names=["a", "b"])
    said = clean.kvd("uninstall").stdout
    assert "left, as it is yours: /etc/kvd" in said
    clean.run("rm", "-r", "/etc/kvd")
    added = files(clean) - before
    assert {path for path in added if not path.endswith(("-", "__pycache__"))} == set()
    assert clean.ask("getent", "passwd") + clean.ask("getent", "group") == users
    assert clean.properties(UNIT, "LoadState", "ActiveState") == {"LoadState": "not-found", "ActiveState": "inactive"}
    assert clean.ask("sh", "-c", "systemctl --failed --plain --no-legend") == ""
    assert "kvd was not installed here" in clean.kvd("uninstall").stdout


def test_another_group_may_connect_and_goes_too_if_it_was_made_here(clean):
    clean.add_user("erin")
    clean.run("groupadd", "people")
    clean.run("usermod", "-aG", "people", "erin")
    users = clean.ask("getent", "passwd") + clean.ask("getent", "group")
    service = ServiceUnderTest(clean)
    service.configure()
    for group, is_member in (("people", True), ("llm", False)):
        # Over what is installed, too: with the group of the unit changes who may connect.
        clean.kvd("install", "--now", "--group", group)
        clean.kvd("install", "--now", "--group", group)
        with actor(clean.prefix("erin"), connects=False) as erin:
            assert (erin.do("connect")["code"] == "") is is_member
    clean.kvd("uninstall")
    assert clean.ask("getent", "passwd") + clean.ask("getent", "group") == users


def test_a_users_own_service(clean):
    clean.add_user("carol")
    clean.add_user("dave")
    uid = clean.ask("id", "-u", "carol")
    clean.run("loginctl", "enable-linger", "carol")
    session = [f"XDG_RUNTIME_DIR=/run/user/{uid}", f"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{uid}/bus"]
    eventually(
        lambda: clean.run("systemctl", "--user", "status", user="carol", environ=session, check=False).returncode == 0,
        30,
    )
    own = "/home/carol/.config/kvd/kvd.toml"
    clean.write(own, '[memory]\nbudget = "16MiB"\nsegment = "1MiB"\n[tiers.redis]\nbudget = "16MiB"\n')
    clean.run("chown", "-R", "carol:carol", "/home/carol/.config")
    before = files(clean)
    clean.kvd("install", "--user", "--now", user="carol", environ=session)
    folder = f"/run/user/{uid}/kvd"
    with actor(clean.prefix("carol"), folder) as client:
        assert client.do("seal", model="m", names=["a", "b"]) == {"num_cached": 0}
        assert client.do("who")["uid"] == int(uid)
    with actor(clean.prefix("dave"), folder, connects=False) as other:
        assert other.do("connect")["code"] == "permission-refused"
    clean.run("systemctl", "--user", "restart", "kvd", user="carol", environ=session)
    with actor(clean.prefix("carol"), folder) as client:
        client.await_redis()
        assert client.do("seal", model="m", names=["a", "b"]) == {"num_cached": 2}
    clean.kvd("uninstall", "--user", user="carol", environ=session)
    assert {
        path for path in files(clean) - before if not path.endswith(("/systemd", "/user", "/state", "/.local"))
    } == set()
    assert clean.run("test", "-e", folder, check=False).returncode
