"""One thread's line to the daemon: there when it is, left alone for a while when it is not. Faults are counted."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import kvd_client
from kvd.errors import ClientClosed, ConnectionFailed, DaemonRestarted, KvdError, RequestTimeout
from kvd.hashing import Namespace
from kvd_client.cache import Cache
from kvd_client.client import Client

T = TypeVar("T")
PAUSE_S = 2.0
QUIET_S = 60.0
MAX_NAMESPACES = 128
"""A session may hold 256; each salt, adapter and set of pictures takes one."""
log = logging.getLogger("vllm.kvd")
"""Below vLLM's own logger, so that it is seen where vLLM's lines are."""


class Daemon:
    """Calls that may fail: `ask` answers None instead of raising, counts, and logs each kind of fault once a minute.

    One thread at a time.
    """

    def __init__(
        self, runtime_dir: str | None, *, label: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.faults: Counter[str] = Counter()
        """"what code" -> how often."""
        self._runtime_dir = runtime_dir
        self._label = label
        self._timeout_s = timeout_s
        self._clock = clock
        self._client: Client | None = None
        self._namespaces: set[Namespace] = set()
        self._not_before_s = float("-inf")
        self._logged_s: dict[str, float] = {}

    def ask(self, what: str, call: Callable[[Client], T]) -> T | None:
        """The call's result, or None. `what` names it in counters and in the log. Bounded by `timeout_s`."""
        if self._clock() < self._not_before_s:
            self.faults[f"{what} paused"] += 1
            return None
        try:
            return call(self._connected())
        except KvdError as error:
            self._note(what, error)
            if isinstance(error, ConnectionFailed | RequestTimeout):
                # Each further try would cost the engine as much again.
                self._not_before_s = self._clock() + PAUSE_S
            if isinstance(error, DaemonRestarted | ClientClosed | RequestTimeout):
                self._drop()
            return None

    def cache(self, client: Client, namespace: Namespace) -> Cache:
        """Within a call: the cache of a namespace, with checksums where the daemon keeps them."""
        self._namespaces.add(namespace)
        return client.cache(
            model=namespace.model,
            layout=namespace.layout,
            engine=namespace.engine,
            positional=namespace.positional,
            adapter=namespace.adapter,
            salt=namespace.salt,
            checksums=True,
        )

    def _connected(self) -> Client:
        if len(self._namespaces) >= MAX_NAMESPACES:
            self._drop()
        if self._client is None:
            self._client = kvd_client.connect(
                self._runtime_dir, label=self._label, timeout_s=self._timeout_s, reserve_ahead_tokens=0
            )
        return self._client

    def _note(self, what: str, error: KvdError) -> None:
        kind = f"{what} {error.code}"
        self.faults[kind] += 1
        now_s = self._clock()
        if now_s - self._logged_s.get(kind, float("-inf")) >= QUIET_S:
            self._logged_s[kind] = now_s
            log.warning("kvd: %s failed (%d times so far); vLLM goes on without: %s", what, self.faults[kind], error)

    def _drop(self) -> None:
        client, self._client = self._client, None
        self._namespaces.clear()
        if client is not None:
            with contextlib.suppress(KvdError):
                client.close()

    def close(self) -> None:
        """Idempotent."""
        self._not_before_s = float("inf")
        self._drop()
