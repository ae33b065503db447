"""systemd as `kvd install` and `kvd uninstall` use it: files that are ours, and commands that may fail."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.cli.text import one_line
from kvd.errors import InstallError
from kvd.systemd.units import MARK, user_unit

BOOTED = Path("/run/systemd/system")
"""sd_booted(3): it is there where systemd is the init of this machine or container."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where files go: the system's, or a user's own; under `root` when that is not the running system's."""

    is_user: bool
    root: Path = Path("/")

    def path(self, path: Path) -> Path:
        """The file that is written for an absolute path."""
        return self.root / path.relative_to("/")

    @property
    def is_live(self) -> bool:
        """Whether a service manager runs here that is to hear of what was written."""
        return self.root == Path("/") and BOOTED.exists()

    def check_rights(self) -> None:
        """Raises `InstallError` unless this user may do this here."""
        if self.is_user and os.geteuid() == 0:
            raise InstallError("--user is for users; root installs the system's service: kvd install")
        if not self.is_user and self.root == Path("/") and os.geteuid() != 0:
            raise InstallError("the system's service is root's to install: use sudo, or --user for one of your own")

    def systemctl(self, *args: str) -> None:
        """Raises `InstallError`."""
        run(["systemctl", *(["--user"] if self.is_user else []), *args])


def config_home() -> Path:
    """$XDG_CONFIG_HOME, else ~/.config."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if named else Path.home() / ".config"


def own_unit() -> Path:
    """The unit of this user's own service."""
    return user_unit(config_home())


def run(argv: Sequence[str]) -> None:
    """Raises `InstallError` with what the command said when it fails or is not there."""
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.CalledProcessError as error:
        said = one_line(error.stdout.decode(errors="replace"))
        raise InstallError(f"`{' '.join(argv)}` failed: {said or f'exit code {error.returncode}'}") from error
    except OSError as error:
        raise InstallError(f"`{argv[0]}` cannot be run: {error.strerror}") from error


def is_ours(path: Path) -> bool:
    """Whether `kvd install` wrote this file. Raises `InstallError` when it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(MARK)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InstallError(f"cannot read {path}: {error.strerror}") from error


def check_not_foreign(paths: Iterable[Path]) -> None:
    """Raises `InstallError` when one of them is there and somebody else's."""
    for path in paths:
        if path.exists() and not is_ours(path):
            raise InstallError(f"{path} is there and was not written by `kvd install`; move it away first")


def write(path: Path, text: str) -> bool:
    """Writes a file as a whole, readable by all; whether it was another before. Raises `InstallError`."""
    beside = path.with_name(f".{path.name}.new")
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o644)
        beside.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise InstallError(f"cannot write {path}: {error.strerror}") from error
    return True


def remove(path: Path) -> None:
    """And its folder, if nothing else is in it. Raises `InstallError`; fine for a file that is not there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InstallError(f"cannot remove {path}: {error.strerror}") from error
    with contextlib.suppress(OSError):
        path.parent.rmdir()
