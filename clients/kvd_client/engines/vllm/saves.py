"""Saves on a thread of their own, one at a time; what vLLM takes back its blocks from is let go of first."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from kvd_client.engines.vllm.daemon import log
from kvd_client.engines.vllm.metadata import Save


class Saves:
    """A queue with at most one save a request: a later one has all tokens of an earlier one.

    `store(save, may_copy)` runs on the thread. It must call `may_copy()` just before it reads vLLM's blocks, read
    nothing when that is False, and call `copied()` when it has read them. All methods are safe from any thread.
    """

    def __init__(
        self, store: Callable[[Save, Callable[[], bool]], None], *, changed: threading.Condition, max_pending: int
    ) -> None:
        """`changed` protects everything here, and is notified when something ends."""
        self._store = store
        self._changed = changed
        self._max_pending = max_pending
        self._pending: dict[str, Save] = {}
        self._active: Save | None = None
        self._is_copying = False
        self._is_abandoned = False
        self._done: Counter[int] = Counter()
        self.num_dropped = 0
        """For lack of room in the queue."""
        # Its threads are joined when the interpreter ends, so what is queued then is still saved.
        self._thread = ThreadPoolExecutor(1, "kvd-save")

    def put(self, save: Save) -> None:
        """Never blocks."""
        with self._changed:
            if (earlier := self._drop(save.request)) is not None:
                save = save.after(earlier)
            if len(self._pending) >= self._max_pending:
                self.num_dropped += 1
                self._done[save.number] += 1
                return
            self._pending[save.request] = save
        self.submit(self._work)

    def submit(self, call: Callable[[], None]) -> None:
        """Runs something else on the thread, after the save that runs now."""
        self._thread.submit(call).add_done_callback(report_defect)

    def _work(self) -> None:
        with self._changed:
            name = next(iter(self._pending), None)
            if name is None:
                return
            save = self._active = self._pending.pop(name)
            self._is_abandoned = False
        try:
            self._store(save, self._may_copy)
        finally:
            with self._changed:
                self._active = None
                self._is_copying = False
                self._done[save.number] += 1
                self._changed.notify_all()

    def _may_copy(self) -> bool:
        with self._changed:
            self._is_copying = not self._is_abandoned
            return self._is_copying

    def copied(self) -> None:
        """The save that runs has read vLLM's blocks."""
        with self._changed:
            self._is_copying = False
            self._changed.notify_all()

    def abandon(self, requests: Collection[str] | None = None) -> None:
        """Returns when no block of these requests (of all, without any) is read any more; a copy that runs is ended.

        That takes as long as the copy of one request's new blocks at most: no answer of the daemon is waited for.
        """
        with self._changed:
            for name in list(self._pending) if requests is None else requests:
                self._drop(name)
            active = self._active
            if active is not None and (requests is None or active.request in requests):
                self._is_abandoned = True
                self._changed.wait_for(lambda: self._active is not active or not self._is_copying)

    def _drop(self, name: str) -> Save | None:
        save = self._pending.pop(name, None)
        if save is not None:
            self._done[save.number] += 1
        return save

    def reads(self, request: str) -> bool:
        """Whether blocks of a request may still be read. Under `changed`."""
        return request in self._pending or (self._active is not None and self._active.request == request)

    def take_done(self) -> Counter[int]:
        """Numbers of the saves that ended since the last call, well or not. Under `changed`."""
        done, self._done = self._done, Counter()
        return done

    def close(self) -> None:
        """Saves what is queued, then ends the thread. Idempotent."""
        self._thread.shutdown(wait=True)


def report_defect(future: Future[None]) -> None:
    """Faults of the daemon are dealt with where they arise; anything else is a defect, and must not be lost."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("kvd: a defect of the connector; vLLM goes on without", exc_info=error)
