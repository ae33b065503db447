"""What may happen in a finalizer: nearly nothing, so it is put off until it may.

A tensor can die in any thread at any moment, even inside this library while it holds a lock. So a finalizer only
appends to a queue and *tries* the lock; whoever holds the lock works the queue off after letting go of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Guard:
    """A lock with a queue of work to do under it. Held for moments only: never while waiting for the daemon.

    `guard.run(work)` takes the lock for `work`. `guard.later(work)` runs it under the lock now if that is free, else as
    soon as its holder lets go; such work must not raise. Neither may take the lock itself.
    """

    __slots__ = ("_lock", "_queue")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()

    def later(self, work: Callable[[], None]) -> None:
        """Callable from any thread, from finalizers, with or without the lock held; never blocks."""
        self._queue.append(work)
        self._work_off()

    def _work_off(self) -> None:
        # After each release the queue is looked at again: work added while the lock was held is never left behind.
        while self._queue and self._lock.acquire(blocking=False):
            try:
                while self._queue:
                    self._queue.popleft()()
            finally:
                self._lock.release()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        try:
            # The interpreter's own lock in a `with`, and not a context manager of ours: between that one's steps a
            # signal could raise, and the lock would stay locked.
            with self._lock:
                return work()
        finally:
            self._work_off()

    def acquire_for_fork(self) -> bool:
        """Keeps mappings as they are while the process forks; gives up after a second rather than block a fork."""
        return self._lock.acquire(timeout=1)

    def release_after_fork(self) -> None:
        """In the parent, after `acquire_for_fork` gave True."""
        self._lock.release()
        self._work_off()
