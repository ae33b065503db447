"""The slot keeper: brings a snapshot into a slot before a completion, and keeps the slot's state after it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kvd.errors import KvdError
from kvd.hashing import TOKEN_NBYTES
from kvd_client.engines.llama_cpp.costs import Costs
from kvd_client.engines.llama_cpp.prompts import Ask
from kvd_client.engines.llama_cpp.slots import Slot, Slots
from kvd_client.engines.llama_cpp.snapshots import STEP_TOKENS, Snapshot
from kvd_client.engines.llama_cpp.store import Store

T = TypeVar("T")
MIN_GAIN_TOKENS = 2 * STEP_TOKENS
"""Less than that is computed, and not kept by itself."""
QUIET_BOUND_S = 2.0
"""How long a snapshot waits for a moment without requests."""
BUSY_GAIN = 20
"""Then it is written all the same if the prompt took this many times longer to compute than it takes to write."""
MAX_UNUSED = 3
DRAIN_BOUND_S = 5.0
_HEAD_SLACK_NBYTES = 64
"""Of a state's file, around its tokens."""
IsOurs = Callable[[], bool]
"""Whether nobody can have computed in the slot under other adapters since a request asked for it."""
_log = logging.getLogger(__name__)


class Keeper:
    """Of one server and one event loop. Nothing here fails a request: what does not work is counted, and computed.

    A slot's file passes through `folder`, which should be in memory and is where the server reads and writes them.
    """

    def __init__(
        self, *, store: Store, slots: Slots, ask: Ask, folder: Path, clock: Callable[[], float] | None = None
    ) -> None:
        self.costs = Costs()
        self.counters: Counter[str] = Counter(
            restores=0,
            restored_tokens=0,
            misses=0,
            late=0,
            failed_restores=0,
            unused_restores=0,
            refused=0,
            saves=0,
            saved_nbytes=0,
            postponed_saves=0,
            failed_saves=0,
        )
        self.is_cuttable = True
        """Whether the server can use a state beyond the common prefix; learnt, since it does not say."""
        self._store = store
        self._slots = slots
        self._ask = ask
        self._folder = folder
        self._clock = clock or asyncio.get_running_loop().time
        self._numbers = itertools.count(1)
        # Who saves must not keep those from their turn who wait for a snapshot.
        self._finders = ThreadPoolExecutor(2, thread_name_prefix="kvd-find")
        self._savers = ThreadPoolExecutor(1, thread_name_prefix="kvd-save")
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._num_unused = 0
        self._saving: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """Of the set of snapshots."""
        return self._store.name

    def requests_changed(self) -> None:
        """Somebody took a slot or gave it back."""
        if self._slots.num_taken:
            self._quiet.clear()
        else:
            self._quiet.set()

    async def restore(self, slot: Slot, tokens: bytes, num_known: int, is_ours: IsOurs = lambda: True) -> int:
        """Before a completion of `tokens` in a slot that holds `num_known` of them; how many it holds afterwards."""
        if slot.saving is not None and not slot.is_being_written:
            slot.saving.cancel()  # what it would have written is about to change
        num_tokens = len(tokens) // TOKEN_NBYTES
        if not self.is_cuttable or num_tokens - num_known < MIN_GAIN_TOKENS:
            return num_known
        start_s = self._clock()
        bound_s = self.costs.bound_s(num_tokens - num_known)
        found = self._run(self._finders, lambda: self._find(tokens, num_known, bound_s))
        found.add_done_callback(_look_at)
        try:
            snapshot = await asyncio.wait_for(asyncio.shield(found), bound_s)
        except TimeoutError:
            self.counters["late"] += 1
            return num_known
        except (KvdError, OSError) as error:
            self._failed("failed_restores", "find", error)
            return num_known
        if snapshot is None:
            self.counters["misses"] += 1
            return num_known
        return await self._load(slot, tokens, num_known, snapshot, start_s, is_ours)

    def _find(self, tokens: bytes, num_known: int, wait_s: float) -> Snapshot | None:
        snapshots = self._store.snapshots()
        if snapshots is None:
            return None
        return snapshots.find(
            tokens,
            more_than=num_known + MIN_GAIN_TOKENS - STEP_TOKENS,
            is_worth=lambda num_tokens, nbytes: self.costs.is_worth(num_tokens - num_known, nbytes),
            wait_s=wait_s,
        )

    async def _load(
        self, slot: Slot, tokens: bytes, num_known: int, snapshot: Snapshot, start_s: float, is_ours: IsOurs
    ) -> int:
        nbytes = len(snapshot.state)
        common = tokens[: snapshot.num_tokens * TOKEN_NBYTES]
        if not has_tokens(snapshot.state, common):
            self.counters["refused"] += 1
            _log.error("a snapshot has other tokens than it is kept under; it is not used")
            return num_known
        file = self._new_file(slot)
        writing = self._run(self._finders, lambda: _write(file, snapshot.state))
        writing.add_done_callback(_look_at)
        try:
            await asyncio.shield(writing)
            if not is_ours():
                return num_known
            answer = await self._ask(f"/slots/{slot.number}?action=restore", {"filename": file.name})
        except OSError as error:
            self._failed("failed_restores", "write", error)
            return num_known
        finally:
            # A client that goes away does not stop the thread, which may not even have begun.
            writing.add_done_callback(lambda _done: file.unlink(missing_ok=True))
        if not isinstance(answer, dict) or answer.get("n_restored", 0) < snapshot.num_tokens:
            self.counters["failed_restores"] += 1
            slot.tokens = b""
            _log.warning("the server did not take a snapshot of %d tokens: %s", snapshot.num_tokens, answer)
            return 0
        self.costs.restored(nbytes, self._clock() - start_s)
        self.counters["restores"] += 1
        self.counters["restored_tokens"] += snapshot.num_tokens - num_known
        slot.tokens = common
        return snapshot.num_tokens

    def completed(self, num_expected: int, num_known: int, timings: tuple[int, int, float] | None) -> None:
        """The server said how many tokens it took from the slot, how many it computed, and in how many seconds."""
        if timings is None:
            return
        num_cached, num_computed, seconds = timings
        self.costs.computed(num_computed, seconds)
        if num_expected <= num_known:
            return
        if num_cached >= num_expected - STEP_TOKENS:
            self._num_unused = 0
            return
        self.counters["unused_restores"] += 1
        self._num_unused += 1
        if self._num_unused == MAX_UNUSED:
            self.is_cuttable = False
            _log.warning("the server does not use what is restored (a model that cannot cut its state?); no more of it")

    def save_later(self, slot: Slot, tokens: bytes, prefill_s: float, is_ours: IsOurs = lambda: True) -> None:
        """After a completion whose prompt was `tokens`, and took `prefill_s` to compute."""
        slot.saving = asyncio.create_task(self._save(slot, tokens, prefill_s, is_ours))
        self._saving.add(slot.saving)
        slot.saving.add_done_callback(self._saving.discard)

    async def _save(self, slot: Slot, tokens: bytes, prefill_s: float, is_ours: IsOurs) -> None:
        try:
            if not await self._run(self._savers, lambda: self._is_news(tokens)):
                return
            if not await self._may_write(slot, prefill_s):
                self.counters["postponed_saves"] += 1
                return
            if is_ours():
                await self._write_and_keep(slot, tokens, is_ours)
        except (KvdError, OSError) as error:
            self._failed("failed_saves", "keep", error)

    def _is_news(self, tokens: bytes) -> bool:
        snapshots = self._store.snapshots()
        if snapshots is None:
            return False
        return len(tokens) // TOKEN_NBYTES // STEP_TOKENS * STEP_TOKENS - snapshots.longest(tokens) >= MIN_GAIN_TOKENS

    async def _may_write(self, slot: Slot, prefill_s: float) -> bool:
        """Waits for a moment in which writing delays nobody; or says that it is worth a short delay, or not."""
        try:
            await asyncio.wait_for(self._quiet.wait(), QUIET_BOUND_S)
        except TimeoutError:
            guess_nbytes = self.counters["saved_nbytes"] // max(1, self.counters["saves"])
            return not slot.is_taken and prefill_s >= BUSY_GAIN * self.costs.transfer_s(guess_nbytes)
        return not slot.is_taken

    async def _write_and_keep(self, slot: Slot, tokens: bytes, is_ours: IsOurs) -> None:
        file = self._new_file(slot)
        slot.is_being_written = True
        try:
            answer = await self._ask(f"/slots/{slot.number}?action=save", {"filename": file.name})
            if not isinstance(answer, dict) or "n_saved" not in answer:
                self.counters["failed_saves"] += 1
                _log.warning("the server did not save slot %d (is %s full?): %s", slot.number, self._folder, answer)
                return
            # The tokens in the file do not say under which adapters it was computed.
            nbytes = await self._run(self._savers, lambda: self._keep(file, tokens)) if is_ours() else 0
        finally:
            slot.is_being_written = False
            file.unlink(missing_ok=True)
        if nbytes:
            self.counters["saves"] += 1
            self.counters["saved_nbytes"] += nbytes

    def _keep(self, file: Path, tokens: bytes) -> int:
        snapshots = self._store.snapshots()
        if snapshots is None:
            return 0
        with file.open("rb") as opened:
            # Never closed by hand: views of it may live a little longer in an error's traceback.
            state = memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
        if not has_tokens(state, tokens):
            return 0  # another request has had the slot since
        return len(state) if snapshots.save(tokens, state, at_least=MIN_GAIN_TOKENS) else 0

    async def drain(self) -> None:
        """Before the server is stopped: the snapshots that wait are written, within a few seconds."""
        waiting = list(self._saving)
        if waiting:
            await asyncio.wait(waiting, timeout=DRAIN_BOUND_S)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def close(self) -> None:
        """Idempotent; `drain` comes first. Waits for what a thread has begun."""
        for pool in (self._finders, self._savers):
            pool.shutdown(cancel_futures=True)
        self._store.close()

    def _new_file(self, slot: Slot) -> Path:
        return self._folder / f"kvd-{os.getpid()}-{slot.number}-{next(self._numbers)}.state"

    def _run(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(pool, call)

    def _failed(self, counter: str, what: str, error: Exception) -> None:
        self.counters[counter] += 1
        _log.warning("could not %s a snapshot: %s", what, error)


def _look_at(done: asyncio.Future[Any]) -> None:
    """For what nobody may be waiting for any more: its error was no secret."""
    if not done.cancelled():
        done.exception()


def has_tokens(state: memoryview, tokens: bytes) -> bool:
    """Whether a slot's file begins with these tokens: a header, then how many, then the ids, as the server packs them.

    The header differs between versions, so the ids are looked for in the first bytes.
    """
    return bytes(state[: len(tokens) + _HEAD_SLACK_NBYTES]).find(tokens) >= 0


def _write(file: Path, content: memoryview) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as opened:
        left: Any = content
        while len(left):
            left = left[opened.write(left) :]
