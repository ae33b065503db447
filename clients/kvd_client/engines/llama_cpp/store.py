"""The proxy's end of kvd: a client that is connected when there is a daemon, and asked on threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import kvd_client
from kvd.errors import KvdError
from kvd_client.engines.llama_cpp.snapshots import Snapshots

RETRY_S = 2.0
_log = logging.getLogger(__name__)


class Store:
    """Gives the snapshots, or None while no daemon is there; tries again every two seconds. Safe from several threads.

    A daemon that restarts is found again by the client itself, which holds nothing but views.
    """

    def __init__(
        self, name: str, runtime_dir: str | Path | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._runtime_dir = runtime_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._client: kvd_client.Client | None = None
        self._retry_at_s = 0.0
        self._closed = False

    def snapshots(self) -> Snapshots | None:
        """May wait for the daemon to answer, as long as a client does."""
        with self._lock:
            if self._client is None:
                if self._closed or self._clock() < self._retry_at_s:
                    return None
                try:
                    self._client = kvd_client.connect(self._runtime_dir, label="llama-server")
                except KvdError as error:
                    if not self._retry_at_s:
                        _log.warning("no snapshots until a daemon is there: %s", error)
                    self._retry_at_s = self._clock() + RETRY_S
                    return None
                self._retry_at_s = 0.0
            return Snapshots(self._client.blobs(self.name))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
