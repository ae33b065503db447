"""kvd's own Valkey: found, started, watched, restarted and stopped by the daemon, on a private unix socket.

The server listens on `redis.starting` until it has loaded its snapshot and heard of every flush since (see
`generation_journal`); only then is that socket renamed to `redis.sock`, which is what the tier connects to. So nobody
ever reads a snapshot's view of a namespace that was flushed after it was taken.

The server must not outlive us. It is started through a few lines of Python that ask the kernel for SIGKILL at the death
of the thread that started it, and check that this has not happened yet; hence it is the watching thread, which lives
until the server is stopped, that starts it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvd.errors import RuntimeFolderError, TierError, TierUnavailable
from kvd.polling import readable
from kvd.tiers.embedded_config import server_arguments
from kvd.tiers.own_file import OwnFile
from kvd.tiers.redis_url import Node, RedisAddress

_log = logging.getLogger(__name__)

_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """Sizes, places and times of the embedded server."""

    runtime_dir: Path
    """Holds the socket and the server's log."""
    budget_nbytes: int
    """The server's maxmemory; least recently used values go first."""
    persistence_dir: Path | None = None
    """Where the snapshot lies; None: nothing survives the server."""
    start_timeout_s: float = 10.0
    """Bounds the wait for the first sign of life; loading a snapshot may take longer and is waited for."""
    stop_timeout_s: float = 30.0
    """After this a stop, which writes the snapshot, ends in SIGKILL."""
    first_backoff_s: float = 0.2
    max_backoff_s: float = 30.0


class EmbeddedServer:
    """One server process and the thread that watches it.

    `prepare(address)` is called on that thread each time the server is up, before anybody can connect to `address`.
    """

    def __init__(
        self,
        binary: Path,
        options: EmbeddedOptions,
        *,
        prepare: Callable[[RedisAddress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._binary = binary
        self._options = options
        self._prepare = prepare
        self._clock = clock
        self._starting = options.runtime_dir / "redis.starting"
        self._socket = options.runtime_dir / "redis.sock"
        self._log_path = options.runtime_dir / "redis.log"
        self._log_file: OwnFile | None = None
        """There as long as the folder is ours: another daemon that takes it over has a log of its own there."""
        self.address = RedisAddress(nodes=(Node(str(self._socket), 0),))
        self._stop_fd = -1
        self._stopping = False
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = False
        self._up_since_s: float | None = None
        self._num_starts = 0
        self._last_error = ""
        self._thread: threading.Thread | None = None
        self._arguments = server_arguments(
            socket_path=self._starting,
            budget_nbytes=options.budget_nbytes,
            persistence_dir=options.persistence_dir,
            log_path=self._log_path,
        )

    @property
    def pid(self) -> int | None:
        """Of the running server; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def is_up(self) -> bool:
        """Whether clients can connect."""
        return self._is_up

    @property
    def num_restarts(self) -> int:
        """How often it died and was started again."""
        return max(0, self._num_starts - 1)

    @property
    def last_error(self) -> str:
        """Why it last failed to start or died; empty when it never did, or has run for `max_backoff_s` since."""
        up_since_s = self._up_since_s
        if up_since_s is not None and self._clock() - up_since_s > self._options.max_backoff_s:
            return ""
        return self._last_error

    def start(self) -> None:
        """Start the watching thread; returns at once. `wait_until_up` tells when the server serves."""
        if self._thread is None:
            self._stopping = False
            self._stop_fd = os.eventfd(0)
            self._thread = threading.Thread(target=self._watch, name="kvd-embedded-redis", daemon=True)
            self._thread.start()

    def wait_until_up(self, timeout_s: float) -> None:
        """Raises `TierUnavailable`, with the server's own last words, when it is not up in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_up, timeout_s):
                raise TierUnavailable(f"the embedded server is not up: {self._last_error or 'still starting'}")

    def stop(self) -> None:
        """Stop the server, which writes its snapshot if it has a persistence folder. Idempotent; bounded."""
        if self._thread is not None:
            self._stopping = True
            os.eventfd_write(self._stop_fd, 1)  # stays readable: it wakes every wait of the thread
            self._thread.join()
            self._thread = None
            os.close(self._stop_fd)
            if self._log_file is not None:
                self._log_file.remove()  # a clean stop leaves nothing in the runtime folder
                self._log_file = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        """The thread: start, wait for the end, start again, ever more slowly while it keeps dying young."""
        backoff_s = self._options.first_backoff_s
        while not self._stopping:
            started_s = self._clock()
            try:
                self._run_once()
            except (TierError, OSError) as error:
                self._failed(str(error))
            lived_long = self._clock() - started_s > self._options.max_backoff_s
            backoff_s = self._options.first_backoff_s if lived_long else backoff_s
            readable(self._stop_fd, bound_s=backoff_s)
            backoff_s = min(backoff_s * 2, self._options.max_backoff_s)

    def _run_once(self) -> None:
        """One life of the server, from start to end."""
        self._claim_folder()
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._binary)]
        process = subprocess.Popen(
            [*launcher, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(os.environ),
            start_new_session=True,
        )
        self._process = process
        self._num_starts += 1
        socket_file: OwnFile | None = None
        try:
            # Only this thread reaps the process, so its number cannot be another's yet.
            exited = os.pidfd_open(process.pid)
        except OSError:
            process.kill()  # it cannot be watched, and holds nothing yet
            process.wait()
            self._process = None
            raise
        try:
            self._await_loaded(process, exited)
            if self._prepare is not None:
                self._prepare(RedisAddress(nodes=(Node(str(self._starting), 0),)))
            self._starting.rename(self._socket)
            socket_file = OwnFile(self._socket)
            self._set_up(True)
            if exited in readable(exited, self._stop_fd):
                self._failed(f"the server ended by itself: {self._how_it_ended(process)}")
        finally:
            self._set_up(False)
            self._end(process, exited)
            os.close(exited)
            if socket_file is not None:
                socket_file.remove()
            if self._log_file is not None and self._log_file.is_there():
                self._starting.unlink(missing_ok=True)

    def _claim_folder(self) -> None:
        """Makes a log of our own. Raises `TierUnavailable` when another daemon's lies there."""
        if self._log_file is not None:
            self._log_file.remove()
            self._log_file = None
        elif not self._num_starts:
            # The daemon has just locked the folder: what lies there is a dead one's.
            for path in (self._starting, self._socket, self._log_path):
                path.unlink(missing_ok=True)
        try:
            self._log_file = OwnFile.create(self._log_path)
        except FileExistsError as error:
            raise TierUnavailable(
                f"another daemon has taken {self._options.runtime_dir} over", cause="embedded"
            ) from error
        except OSError as error:
            raise TierUnavailable(
                f"nothing can be written to {self._options.runtime_dir}: {error.strerror}", cause="embedded"
            ) from error

    def _await_loaded(self, process: subprocess.Popen[bytes], exited: int) -> None:
        """Wait until the server answers PING. A server that loads its snapshot says so, and gets the time it takes."""
        deadline_s = self._clock() + self._options.start_timeout_s
        while True:
            ended = readable(exited, self._stop_fd, bound_s=0.02)
            if exited in ended:
                raise TierUnavailable(f"the server did not start: {self._how_it_ended(process)}", cause="embedded")
            if ended:
                raise TierUnavailable("the server is to stop before it started", cause="embedded")
            answer = self._ping()
            if answer.startswith(b"+PONG"):
                return
            if answer.startswith(b"-LOADING"):
                deadline_s = self._clock() + self._options.start_timeout_s
            elif self._clock() > deadline_s:
                raise TierUnavailable(f"the server does not answer: {self._last_words()}", cause="embedded")

    def _ping(self) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self._starting))
                probe.sendall(b"PING\r\n")
                return probe.recv(64)
            except OSError:
                return b""

    def _end(self, process: subprocess.Popen[bytes], exited: int) -> None:
        """Ask it to end, then make it; nothing is left of it when this returns."""
        process.terminate()
        if not readable(exited, bound_s=self._options.stop_timeout_s):
            _log.warning("the embedded server did not stop in %.0f s: killed", self._options.stop_timeout_s)
            process.kill()
        process.wait()
        self._process = None

    def _how_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        """It has: by which signal, or with which status, last words, and what may be behind them."""
        status = process.wait()
        if status < 0:
            # Its last line was about something else: a signal leaves it no time for words.
            return f"killed by {_signal_name(-status)}"
        text = f"exit status {status}: {self._last_words()}"
        folders = [self._options.runtime_dir, self._options.persistence_dir]
        if full := [folder for folder in folders if folder is not None and _is_disk_full(folder)]:
            text += f"; the disk of {full[0]} is full: free some space"
        return text

    def _last_words(self) -> str:
        try:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"

    def _failed(self, reason: str) -> None:
        if not self._stopping:
            self._last_error = reason
            _log.warning("embedded server: %s", reason)

    def _set_up(self, is_up: bool) -> None:
        with self._changed:
            self._is_up = is_up
            self._up_since_s = self._clock() if is_up else None
            self._changed.notify_all()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_disk_full(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    # Of some file systems (f_files is 0) nobody knows how many inodes there are.
    return not found.f_bavail or (bool(found.f_files) and not found.f_favail)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    # Secrets of the daemon's environment are none of the server's business.
    return {name: environ[name] for name in ("PATH", "LANG", "TZ") if name in environ}


def check_persistence_dir(path: Path) -> None:
    """Make the folder if need be. Raises `RuntimeFolderError` when the server could not write there."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RuntimeFolderError(f"the persistence folder {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise RuntimeFolderError(f"the persistence folder {path} cannot be written by uid {os.getuid()}")


def hold_persistence_dir(path: Path) -> int:
    """Keeps other daemons from writing their snapshot there, until the descriptor is closed or the process ends.

    Raises `RuntimeFolderError` when another one holds the folder, or it cannot be locked.
    """
    descriptor = -1
    try:
        # The file stays: removing it would let two daemons hold two files of one name.
        descriptor = os.open(path / "kvd.held", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise RuntimeFolderError(f"another daemon uses the persistence folder {path}") from error
        raise RuntimeFolderError(f"the persistence folder {path} cannot be locked: {error.strerror}") from error
    return descriptor
