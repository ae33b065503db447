"""One thread of the process attends to device memory: what finalizers must not do, and what nobody else is there for.

Closing an import waits for the card and takes milliseconds, so whoever lets go of device memory, a finalizer included,
only queues that. And a revoke of device memory must be answered while the client is idle: the daemon frees nothing
before. Processes that map no device memory never start the thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import weakref
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Attendant:
    """`put` may be called from any thread, finalizers too; `watch` starts the thread. Work is done in its order."""

    def __init__(self) -> None:
        # Its put is reentrant, so a finalizer may come in the midst of another put.
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
        self._starting = threading.Lock()
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Has `work` done soon, or when the thread is started; what it raises is logged. Never blocks, never raises."""
        self._queue.put(work)
        if self._wake_fd >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int, drain: Callable[[], None]) -> None:
        """Calls `drain`, a bound method whose object is not kept, whenever `fd` can be read, until that is closed."""
        with self._starting:
            epoll = self._start()
            # A closed descriptor leaves epoll by itself; its number here may be an earlier session's.
            self._watched[fd] = weakref.WeakMethod(drain)
            # It may be closed by now, as a session can end at any moment.
            with contextlib.suppress(OSError, ValueError):
                epoll.register(fd, select.EPOLLIN)

    def settle(self, bound_s: float) -> bool:
        """Waits until everything put before is done, so long at most. Not from finalizers."""
        done = threading.Event()
        if self._thread in {None, threading.current_thread()}:
            return True
        self.put(done.set)
        return done.wait(bound_s)

    def _start(self) -> select.epoll:
        if self._epoll is None:
            self._epoll = select.epoll()
            wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(wake_fd, select.EPOLLIN)
            self._wake_fd = wake_fd
            self._thread = threading.Thread(
                target=self._run, args=(self._epoll,), name="kvd-device-attendant", daemon=True
            )
            self._thread.start()
        return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        while True:
            self._work_off()
            for fd, _events in epoll.poll():
                if fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                else:
                    self._drain(epoll, fd)

    def _work_off(self) -> None:
        while True:
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return
            try:
                work()
            except Exception:  # noqa: BLE001 - the thread is everybody's
                _log.exception("a defect in kvd: work on device memory failed")
            # Not kept until the next one comes: it may hold the last reference to a tensor or a session.
            del work

    def _drain(self, epoll: select.epoll, fd: int) -> None:
        watched = self._watched.get(fd)
        drain = None if watched is None else watched()
        try:
            if drain is not None:
                drain()
                return
        except Exception:  # noqa: BLE001 - the thread is everybody's
            _log.exception("a defect in kvd: a session could not be read")
        # Nobody reads it any more, and it must not keep this thread busy.
        with contextlib.suppress(OSError):
            epoll.unregister(fd)

    def forget_in_child(self) -> None:
        """In a forked child, where the thread is not: closes what was inherited."""
        if self._epoll is not None:
            self._epoll.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1


_current = [Attendant()]


def attendant() -> Attendant:
    """The process's own."""
    return _current[0]


def _in_child() -> None:
    # Its queue is the parent's affair.
    _current.pop().forget_in_child()
    _current.append(Attendant())


os.register_at_fork(after_in_child=_in_child)
