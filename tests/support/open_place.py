"""A folder that every user may enter, for tests in which other users connect: pytest's own are closed to them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.daemon import Daemon


@contextlib.contextmanager
def open_place() -> Iterator[Path]:
    """Gone at the end, with all that is in it."""
    with tempfile.TemporaryDirectory(prefix="kvd-users-") as name:
        (place := Path(name)).chmod(0o755)
        yield place


def open_doors(daemon: Daemon) -> None:
    """Lets every user connect to a daemon in an open place: what keeps them apart is then the daemon alone."""
    daemon.folder.chmod(0o755)
    for path in daemon.folder.glob("*.sock"):
        path.chmod(0o666)
