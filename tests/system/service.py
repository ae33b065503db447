"""The installed service, as the tests of this folder use it."""

from __future__ import annotations

from tests.support.wait import eventually
from tests.system.machine import Machine

UNIT = "kvd.service"
CONFIG = "/etc/kvd/kvd.toml"
DROP_IN = "/run/systemd/system/kvd.service.d/test.conf"
SMALL = '[memory]\nbudget = "64MiB"\nsegment = "1MiB"\n[tiers.redis]\nbudget = "64MiB"\n'
RESTART_BOUND_S = 60.0


class ServiceUnderTest:
    """kvd, installed and running."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def install(self) -> str:
        self.configure()
        return self.machine.kvd("install", "--now").stdout

    def configure(self, more: str = "", *, head: str = SMALL) -> None:
        """Takes effect at the next start, or reload."""
        self.machine.write(CONFIG, head + more)

    def override(self, *settings: str) -> None:
        """Settings of the unit, until the next call, from the next start on."""
        self.machine.write(DROP_IN, "[Service]\n" + "".join(f"{line}\n" for line in settings))
        self.machine.run("systemctl", "daemon-reload")

    def restart(self) -> None:
        self.machine.run("systemctl", "reset-failed", UNIT)
        self.machine.run("systemctl", "restart", UNIT)

    def properties(self, *names: str) -> dict[str, str]:
        return self.machine.properties(UNIT, *names)

    @property
    def main_pid(self) -> int:
        """As the machine numbers it."""
        return int(self.properties("MainPID")["MainPID"])

    @property
    def is_active(self) -> bool:
        return self.properties("ActiveState")["ActiveState"] == "active"

    @property
    def num_restarts(self) -> int:
        return int(self.properties("NRestarts")["NRestarts"])

    def signal(self, name: str) -> None:
        self.machine.run("kill", f"-{name}", str(self.main_pid))

    def await_restart(self, num_before: int) -> None:
        """systemd has started it once more, and it is ready."""
        eventually(lambda: self.num_restarts > num_before and self.is_active, RESTART_BOUND_S)

    def journal(self) -> str:
        return self.machine.journal(UNIT)

    def processes(self) -> list[str]:
        """Of the service's user."""
        return self.machine.ask("ps", "-u", "kvd", "-o", "pid=,args=").splitlines()
