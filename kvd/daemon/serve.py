"""Start, main loop, stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvd import __version__
from kvd.build import Assembly, assemble, pool_rules
from kvd.config.schema import Config
from kvd.daemon.folder import LOCK_FILE, access_of_group, locked_folder, prepare_folder
from kvd.daemon.presence import FolderWatch
from kvd.daemon.process import (
    GrowthFreezer,
    calm_garbage_collector,
    hand_over_quickly,
    raise_descriptor_limit,
    start_log,
)
from kvd.daemon.secrecy import keep_memory_private
from kvd.daemon.signals import Signals
from kvd.errors import KvdError
from kvd.protocol.control_page import DaemonState
from kvd.protocol.session import REQUEST_SOCKET, SESSION_SOCKET
from kvd.server.endpoints import check_socket_path
from kvd.service import Service
from kvd.systemd import Notifier

_log = logging.getLogger(__name__)


def serve(config: Config, *, reload: Callable[[], Config] | None = None) -> int:
    """Runs a daemon in the foreground until a signal stops it; the process's exit code.

    Call it on the main thread of a process that does nothing else. 0 after a clean stop; the `exit_code` of the
    `KvdError` that kept it from starting, after one line in the log. `reload` reads the configuration again at SIGHUP.
    """
    start_log(config.log.level)
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
        watchdog, folder_watch = _watchdog(notifier), FolderWatch()

        def on_heartbeat() -> None:
            watchdog()
            folder_watch.look()

        daemon = assemble(config, access, closing, on_heartbeat=on_heartbeat, on_used=GrowthFreezer().look)
        folder_watch.begin([folder / name for name in (LOCK_FILE, SESSION_SOCKET, REQUEST_SOCKET)])
        daemon.server.watch_descriptor(signals.fileno(), lambda: _on_signals(signals, daemon, reload))
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
        notifier.ready(f"serving {folder}")
        daemon.server.run()
        folder_watch.end()
        _log.info("stopping")
        notifier.stopping()
        daemon.control_page.write(DaemonState.STOPPING)
    _log.info("stopped")


def _on_signals(signals: Signals, daemon: Assembly, reload: Callable[[], Config] | None) -> None:
    for number in signals.take():
        if number in {signal.SIGTERM, signal.SIGINT}:
            daemon.server.stop()
        elif number == signal.SIGHUP:
            _reload(reload, daemon.service)


def _reload(reload: Callable[[], Config] | None, service: Service) -> None:
    if reload is None:
        _log.info("SIGHUP: there is no configuration file to read again")
        return
    try:
        config = reload()
        rules = pool_rules(config)
    except KvdError as error:
        _log.warning("SIGHUP: the configuration was not taken over: %s", error)
        return
    logging.getLogger().setLevel(config.log.level.upper())
    service.set_pool_rules(rules)
    _log.info(
        "SIGHUP: log.level is %s now, %d pool rules hold, tiers.spill is %s and tiers.after_promote %s; everything "
        "else takes effect at the next start",
        config.log.level,
        len(rules.rules),
        rules.default.spill,
        rules.default.after_promote,
    )


def _watchdog(notifier: Notifier) -> Callable[[], None]:
    """Tells systemd, at each heartbeat that is due, that the loop turns."""
    interval_s = notifier.watchdog_interval_s
    if interval_s is None:
        return lambda: None
    due_s = time.monotonic()

    def beat() -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + interval_s
            notifier.alive()

    return beat
