"""One epoll descriptor for everything the kernel tells: session sockets, process ends, wake-ups."""

from __future__ import annotations

import select
from collections.abc import Callable

MAX_EVENTS_PER_TURN = 64


class Watch:
    """Calls `callback()` when a descriptor is readable, at its end, or (on request) writable. Loop thread only.

    Level-triggered: what a callback leaves undone is reported again. The epoll descriptor itself is an entry of the
    ZeroMQ poller. `close()` is idempotent and closes no descriptor but its own.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._fresh: set[int] = set()

    def fileno(self) -> int:
        """The epoll descriptor."""
        return self._epoll.fileno()

    def add(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Watches a descriptor for reading."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._callbacks[descriptor] = callback
        self._fresh.add(descriptor)

    def want_write(self, descriptor: int, wanted: bool) -> None:
        """Whether the callback shall also be called when the descriptor can be written."""
        self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, descriptor: int) -> None:
        """Forgets a descriptor; call it before closing. Fine for one that is not watched."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def dispatch(self) -> None:
        """Serves what is ready now, at most `MAX_EVENTS_PER_TURN` descriptors."""
        self._fresh.clear()
        for descriptor, _ in self._epoll.poll(0, MAX_EVENTS_PER_TURN):
            # A callback may close a descriptor whose number another then takes: this event is not the new one's.
            if descriptor in self._fresh:
                continue
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                callback()

    def close(self) -> None:
        """Watches nothing any more."""
        self._callbacks.clear()
        self._epoll.close()
