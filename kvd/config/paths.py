"""Where the daemon's runtime folder and its configuration file are. Shared by the daemon and the client library.

The runtime folder is, first that applies: the caller's, $KVD_RUNTIME_DIR, $RUNTIME_DIRECTORY (systemd sets it for a
service), $XDG_RUNTIME_DIR/kvd, /run/kvd. A daemon takes the first. A client looks for a daemon in the last three, since
a system daemon in /run/kvd serves users whose login session has an $XDG_RUNTIME_DIR of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvd.errors import ConfigError

SYSTEM_RUNTIME_DIR = Path("/run/kvd")
SYSTEM_CONFIG_FILE = Path("/etc/kvd/kvd.toml")
DAEMON_MARK = "session.sock"
"""Tells that a daemon lives in a folder; equals `kvd.protocol.session.SESSION_SOCKET`, which is a sibling layer's."""

MAX_RUNTIME_DIR_NBYTES = 107 - len("/requests.sock")
"""A unix socket's path holds 107 bytes and a NUL (unix(7)); requests.sock is the longest name in the folder."""


def runtime_dir(explicit: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The folder a daemon uses, absolute; it need not exist. Raises `ConfigError` when no socket's path would fit."""
    return _checked(_candidates(explicit, os.environ if environ is None else environ)[0])


def find_runtime_dir(explicit: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The folder a client connects to: the first candidate in which a daemon's socket lies, else the first one.

    A folder that the caller or $KVD_RUNTIME_DIR names is the only candidate. Where no daemon is seen but a folder may
    not be entered it is that one, so that connecting says so. Raises `ConfigError` as `runtime_dir`.
    """
    candidates = [_checked(folder) for folder in _candidates(explicit, os.environ if environ is None else environ)]
    closed = []
    for folder in candidates if len(candidates) > 1 else ():
        try:
            if (folder / DAEMON_MARK).exists():
                return folder
        except PermissionError:
            closed.append(folder)
    return (closed or candidates)[0]


def _candidates(explicit: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> list[Path]:
    if explicit is not None and not os.fspath(explicit):
        # An unset variable of a script; the well-known folders may be another daemon's.
        raise ConfigError("runtime_dir is empty; leave it out for the folder that is looked for")
    named = environ.get("KVD_RUNTIME_DIR", "") if explicit is None else os.fspath(explicit)
    if named:
        return [Path(named)]
    well_known = [SYSTEM_RUNTIME_DIR]
    if login := environ.get("XDG_RUNTIME_DIR"):
        well_known.insert(0, Path(login) / "kvd")
    # systemd joins several folders with colons; the unit's first one is the daemon's.
    if service := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        well_known.insert(0, Path(service))
    return well_known


def _checked(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ConfigError("runtime_dir must not hold a NUL byte")
    absolute = Path.cwd() / (folder.expanduser() if str(folder).startswith("~/") else folder)
    nbytes = len(os.fsencode(absolute))
    if nbytes > MAX_RUNTIME_DIR_NBYTES:
        raise ConfigError(
            f"runtime_dir has {nbytes} bytes, over the {MAX_RUNTIME_DIR_NBYTES} that a unix socket's path leaves: "
            f"choose a shorter folder than {absolute}"
        )
    return absolute


def config_file(
    explicit: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> Path | None:
    """The configuration file: the caller's, $KVD_CONFIG, ~/.config/kvd/kvd.toml, /etc/kvd/kvd.toml; None without any.

    A file that the caller or $KVD_CONFIG names is returned whether it exists or not: reading it then says so.
    So is a well-known one that may not be looked for, rather than to start with other values than its writer meant.
    Raises `ConfigError` for an empty name of the caller's; an empty $KVD_CONFIG is one not set.
    """
    environ = os.environ if environ is None else environ
    if explicit is not None and not os.fspath(explicit):
        # An unset variable of a script, which meant some file and not whichever is found.
        raise ConfigError("the name of the configuration file is empty; leave --config out to use the well-known ones")
    if named := (os.fspath(explicit) if explicit else environ.get("KVD_CONFIG", "")):
        return Path(named)
    home = environ.get("HOME", "")
    personal = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")
    well_known = [Path(personal) / "kvd" / "kvd.toml"] if personal else []
    return next((path for path in [*well_known, SYSTEM_CONFIG_FILE] if _may_be_file(path)), None)


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:
        return True
