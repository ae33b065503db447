"""A machine with a real systemd: a container whose init is systemd, and whose Python and kvd are this checkout's.

The root is Debian as debootstrap makes it (tools/systemd-root); what a test changes is gone with the machine. What it
needs of this checkout is mounted read-only, at the same paths.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvd.systemd.units import this_program
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
BOOT_BOUND_S = 90.0
STOP_BOUND_S = 30.0
COMMAND_BOUND_S = 100.0


class Machine:
    """Boot it, `run` commands in it, `close` it. Takes root."""

    def __init__(self, root: Path, log: Path) -> None:
        self._log = log
        folders = {*this_program().folders, *(ROOT / name for name in ("kvd", "clients", "tests"))}
        binds = [f"--bind-ro={folder}" for folder in sorted(folders) if not folder.is_relative_to("/usr")]
        # Neither a unit nor a registration: the machine that runs the tests may have no systemd of its own.
        argv = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--volatile=overlay"]
        argv += ["--private-network", "--console=pipe", f"--machine=kvd-test-{os.getpid()}", f"--directory={root}"]
        # Should the tests be killed, the machine goes too.
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", *argv, *binds],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            self._leader = eventually(self._find_leader, BOOT_BOUND_S)
            eventually(lambda: self.ask("systemctl", "is-system-running") in {"running", "degraded"}, BOOT_BOUND_S)
            # The interpreter may lie in root's home, which is closed to others.
            self.run("chmod", "755", "/root")
        except BaseException:
            print(log.read_text(errors="replace"), file=sys.stderr)
            self.close()
            raise

    def _find_leader(self) -> int:
        if self._process.poll() is not None:
            raise AssertionError(f"it did not boot:\n{self._log.read_text(errors='replace')}")
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                    return int(child)
        return 0

    def prefix(self, user: str = "root", environ: Sequence[str] = ()) -> list[str]:
        """The words that make a command run in there, as that user, in the checkout's folder."""
        become = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        settings = [f"HOME=/home/{user}", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", *environ]
        return ["nsenter", f"--target={self._leader}", "--all", *become, "env", "-i", "-C", str(ROOT), *settings]

    def run(
        self, *argv: str, user: str = "root", check: bool = True, environ: Sequence[str] = (), text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; `text` is its stdin. Fails with what it said unless its exit code is 0."""
        done = subprocess.run(
            [*self.prefix(user, environ), *argv],
            input="" if text is None else text,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_BOUND_S,
        )
        assert not check or done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done

    def ask(self, *argv: str, user: str = "root") -> str:
        """What a command says, whatever its exit code."""
        return self.run(*argv, user=user, check=False).stdout.strip()

    def kvd(
        self, *argv: str, user: str = "root", check: bool = True, environ: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Runs a kvd command."""
        return self.run(sys.executable, "-m", "kvd.cli", *argv, user=user, check=check, environ=environ)

    def write(self, path: str, text: str) -> None:
        """Writes a file."""
        self.run("sh", "-c", f'mkdir -p "$(dirname {path})" && cat > {path}', text=text)

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        """Of a unit, as systemd has them now."""
        lines = self.ask("systemctl", "show", unit, *(f"--property={name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def journal(self, unit: str) -> str:
        return self.ask("journalctl", "--unit", unit, "--no-pager", "--output=cat")

    def add_user(self, name: str, *groups: str) -> None:
        """With a primary group of its own, as most systems do it."""
        self.run("useradd", "--create-home", "--user-group", *(["--groups", ",".join(groups)] if groups else []), name)

    def close(self) -> None:
        """Switches it off. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # an orderly halt
            try:
                self._process.wait(STOP_BOUND_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
