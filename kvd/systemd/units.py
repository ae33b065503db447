"""The files that make kvd a service, as text: filled in with where kvd is installed and who may connect."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "# Written by `kvd install"
"""How each file begins: what does not is somebody else's, and neither overwritten nor removed."""
USER = "kvd"
DEFAULT_GROUP = "kvd"
GPU_GROUP = "video"
"""Whose the nodes of the NVIDIA driver are where they are not everybody's."""
SYSTEM_UNIT = Path("/etc/systemd/system/kvd.service")
NVIDIA_UNIT = Path("/etc/systemd/system/kvd-nvidia.service")
SYSUSERS = Path("/etc/sysusers.d/kvd.conf")
TMPFILES = Path("/etc/tmpfiles.d/kvd.conf")
_TEMPLATES = Path(__file__).parent / "templates"
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108
"""What ProtectHome= and PrivateTmp= take out of the service's sight."""


@dataclass(frozen=True, slots=True)
class Program:
    """How kvd is started, and the folders that this takes: the interpreter's, the environment's, the package's."""

    argv: tuple[str, ...]
    folders: tuple[Path, ...]

    @property
    def hidden_folders(self) -> tuple[Path, ...]:
        """Those that the service would not see by itself."""
        return tuple(folder for folder in self.folders if any(folder.is_relative_to(place) for place in _HIDDEN))


def this_program() -> Program:
    """The kvd that runs now."""
    package = Path(__file__).parents[1]
    found = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent), *filter(None, sys.path)]
    # The folder that a command was called in is on the path of `python -m`; the service does not need it.
    folders = {Path(entry).absolute() for entry in found} - {Path.cwd()} | {package}
    return Program(
        # -P: nothing is imported from the folder that the service happens to run in.
        argv=(sys.executable, "-P", "-m", "kvd.cli"),
        folders=_outermost(folder for folder in folders if folder.is_dir() and folder != Path("/")),
    )


def _outermost(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Without those that lie in another of them."""
    kept: list[Path] = []
    for folder in sorted(folders):
        if not any(folder.is_relative_to(outer) for outer in kept):
            kept.append(folder)
    return tuple(kept)


def system_files(
    program: Program, group: str = DEFAULT_GROUP, *, makes_groups: Iterable[str] = (), gpu_group: str | None = GPU_GROUP
) -> dict[Path, str]:
    """Path -> text of the system service's files.

    `makes_groups` are to be made, and to go with the service; `gpu_group` None: there is none of that name here.
    """
    binds = " ".join(_word(str(folder), is_command=False) for folder in program.hidden_folders)
    values = {
        "exec": " ".join(map(_word, program.argv)),
        "group": group,
        # sysusers makes a user's own group by itself.
        "group_line": "\n".join(f"g {name} -" for name in sorted(set(makes_groups) - {USER})),
        "gpu_group": "" if gpu_group is None else f"SupplementaryGroups={gpu_group}",
        "protect_home": "tmpfs" if binds else "yes",
        "bind": f"# Where kvd is installed.\nBindReadOnlyPaths={binds}" if binds else "",
    }
    return {
        SYSTEM_UNIT: _filled("kvd.service", values),
        NVIDIA_UNIT: _filled("kvd-nvidia.service", values),
        SYSUSERS: _filled("sysusers.conf", values),
        TMPFILES: _filled("tmpfiles.conf", values),
    }


def made_groups(sysusers: str) -> list[str]:
    """The groups besides the user's own that the text of `SYSUSERS` makes."""
    return [line.split()[1] for line in sysusers.splitlines() if line.startswith("g ")]


def user_files(program: Program, config_home: Path) -> dict[Path, str]:
    """Path -> text of a user's own service's file."""
    text = _filled("kvd-user.service", {"exec": " ".join(map(_word, program.argv))})
    return {user_unit(config_home): text}


def user_unit(config_home: Path) -> Path:
    """Where a user's systemd looks for it; `config_home` is $XDG_CONFIG_HOME, else ~/.config."""
    return config_home / "systemd" / "user" / "kvd.service"


def _filled(template: str, values: dict[str, str]) -> str:
    lines = []
    for line in (_TEMPLATES / template).read_text().splitlines():
        filled = line
        for name, value in values.items():
            filled = filled.replace(f"@{name}@", value)
        # A line that was only a place for something, and got nothing.
        if filled or not line:
            lines.append(filled)
    return "\n".join(lines) + "\n"


def _word(text: str, *, is_command: bool = True) -> str:
    """One word of a unit's setting: % and $ mean themselves, blanks and quotes don't end it."""
    escaped = text.replace("\\", "\\\\").replace("%", "%%")
    if is_command:
        escaped = escaped.replace("$", "$$")
    if any(char.isspace() or char in "\"'" for char in escaped):
        return '"' + escaped.replace('"', '\\"') + '"'
    return escaped
