"""SIGHUP: the configuration is read again, and what can change while the daemon serves takes effect."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvd.build import Assembly, pool_rules
from kvd.config.keys import KEYS
from kvd.config.load import as_flat
from kvd.config.schema import Config
from kvd.errors import KvdError
from kvd.service.pool_rules import PoolRules

RELOADABLE = frozenset({
    "limits.session_nbytes",
    "limits.uid_nbytes",
    "limits.uid_requests",
    "limits.uid_sessions",
    "log.level",
    "tiers.after_promote",
    "tiers.spill",
    "waits.default_s",
    "waits.max_s",
})  # fmt: skip
"""Keys that need no restart, as do the `[[pools]]` tables; README.md lists them."""
_log = logging.getLogger(__name__)


class Reloader:
    """Reads and applies a configuration as a whole, or says why not and leaves everything as it was."""

    def __init__(self, daemon: Assembly, running: Config, read: Callable[[], Config] | None) -> None:
        """`read` reads the sources that `running` came from again; it raises `KvdError`. None: there are none."""
        self._daemon = daemon
        self._values = as_flat(running)
        """What holds now, by key."""
        self._pools = running.pools
        self._read = read

    def reload(self) -> None:
        """Never raises; the log has what became of it."""
        if self._read is None:
            _log.info("SIGHUP: there is no configuration file to read again")
            return
        try:
            config = self._read()
            rules = pool_rules(config, self._daemon.devices)
        except KvdError as error:
            _log.warning("SIGHUP: the configuration was not taken over: %s", error)
            return
        now = as_flat(config)
        changed = [name for name, value in now.items() if value != self._values[name]]
        self._apply(config, rules)
        # What is postponed is named again at the next reload.
        self._values |= {name: now[name] for name in RELOADABLE}
        taken = [f"{name} is {KEYS[name].format(now[name])}" for name in changed if name in RELOADABLE]
        if config.pools != self._pools:
            self._pools = config.pools
            taken.append(f"{len(rules.rules)} pool rules hold")
        _log.info("SIGHUP: %s", ", ".join(taken) or "nothing that can change without a restart is another")
        if postponed := [name for name in changed if name not in RELOADABLE]:
            _log.warning("SIGHUP: %s changed too, and take effect at the next start", ", ".join(postponed))

    def _apply(self, config: Config, rules: PoolRules) -> None:
        logging.getLogger().setLevel(config.log.level.upper())
        limits = self._daemon.server.limits
        limits.uid_sessions = config.limits.uid_sessions or None
        limits.uid_requests = config.limits.uid_requests or None
        service = self._daemon.service
        service.set_quotas(
            session_nbytes=config.limits.session_nbytes or None, uid_nbytes=config.limits.uid_nbytes or None
        )
        service.set_pool_rules(rules)
        service.set_waits(default_s=config.waits.default_s, max_s=config.waits.max_s)
