"""Start, main loop, stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvd import __version__
from kvd.build import assemble
from kvd.config.schema import Config
from kvd.daemon.folder import LOCK_FILE, access_of_group, locked_folder, prepare_folder
from kvd.daemon.manager import ManagerReports, status_line
from kvd.daemon.presence import FolderWatch
from kvd.daemon.process import (
    GrowthFreezer,
    calm_garbage_collector,
    hand_over_quickly,
    raise_descriptor_limit,
    show_where_it_hangs,
    start_log,
)
from kvd.daemon.reload import Reloader
from kvd.daemon.secrecy import keep_memory_private
from kvd.daemon.signals import Signals
from kvd.errors import KvdError
from kvd.protocol.control_page import DaemonState
from kvd.protocol.session import REQUEST_SOCKET, SESSION_SOCKET
from kvd.server.endpoints import check_socket_path
from kvd.systemd import Notifier

_log = logging.getLogger(__name__)


def serve(config: Config, *, reload: Callable[[], Config] | None = None) -> int:
    """Runs a daemon in the foreground until a signal stops it; the process's exit code.

    Call it on the main thread of a process that does nothing else. 0 after a clean stop; the `exit_code` of the
    `KvdError` that kept it from starting, after one line in the log. `reload` reads the configuration again at SIGHUP.
    """
    start_log(config.log.level)
    show_where_it_hangs()
    try:
        _serve(config, reload)
    except KvdError as error:
        _log.error("%s", error)
        return error.exit_code
    return 0


def _serve(config: Config, reload: Callable[[], Config] | None) -> None:
    started_s = time.monotonic()
    keep_memory_private()
    raise_descriptor_limit()
    hand_over_quickly()
    folder = Path(config.runtime_dir)
    check_socket_path(folder / REQUEST_SOCKET)
    access = access_of_group(config.access.group)
    notifier = Notifier(os.environ)
    with contextlib.ExitStack() as closing:
        signals = closing.enter_context(Signals())
        prepare_folder(folder, access)
        closing.enter_context(locked_folder(folder))
        reports, folder_watch = ManagerReports(notifier), FolderWatch()
        describe: Callable[[], str] | None = None

        def on_heartbeat() -> None:
            reports.beat(describe)
            folder_watch.look()

        daemon = assemble(config, access, closing, on_heartbeat=on_heartbeat, on_used=GrowthFreezer().look)
        folder_watch.begin([folder / name for name in (LOCK_FILE, SESSION_SOCKET, REQUEST_SOCKET)])
        reloader = Reloader(daemon, config, reload)

        def on_signals() -> None:
            for number in signals.take():
                if number == signal.SIGHUP:
                    notifier.reloading()
                    reloader.reload()
                    notifier.ready(status_line(daemon.service))
                else:
                    daemon.server.stop()

        daemon.server.watch_descriptor(signals.fileno(), on_signals)
        calm_garbage_collector()
        daemon.control_page.write(DaemonState.SERVING)
        _log.info(
            "kvd %s serves %s: %d MiB in segments of %d MiB, ready after %.2f s",
            __version__,
            folder,
            daemon.sizes.budget_nbytes >> 20,
            daemon.sizes.segment_nbytes >> 20,
            time.monotonic() - started_s,
        )
        describe = partial(status_line, daemon.service)
        notifier.ready(describe())
        daemon.server.run()
        describe = None
        folder_watch.end()
        _log.info("stopping")
        notifier.stopping("stopping: what has no copy below the pools is being copied down")
        daemon.control_page.write(DaemonState.STOPPING)
    _log.info("stopped")
