"""The half of the connector beside a rank's model: copies blocks in and out, on two threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from kvd.errors import CorruptBlock, EngineUnsupported
from kvd_client.client import Client
from kvd_client.engines.vllm.daemon import Daemon, log
from kvd_client.engines.vllm.identity import Names
from kvd_client.engines.vllm.metadata import Load, Save, StepMetadata, WorkerReport
from kvd_client.engines.vllm.saves import Saves, report_defect
from kvd_client.engines.vllm.settings import Settings
from kvd_client.engines.vllm.slabs import Slabs

IDLE_WAIT_S = 0.01
"""A step that computes nothing waits so long for a copy to end: vLLM would run such steps without a pause."""


class WorkerSide:
    """Called by one rank's model runner, in one thread; copies run in two others."""

    def __init__(
        self,
        names: Names,
        settings: Settings,
        *,
        rank: int,
        layers: list[str],
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layers`: their names in vLLM, in the order of a block; `block_size`: tokens in one of vLLM's blocks."""
        self._names = names
        self._settings = settings
        self._rank = rank
        self._layers = layers
        self._block_size = block_size
        self._clock = clock
        self._began_s = clock()
        self._slabs: Slabs | None = None
        self._loading = Daemon(settings.runtime_dir, label="vllm loads", timeout_s=settings.timeout_s)
        self._saving = Daemon(settings.runtime_dir, label="vllm saves", timeout_s=settings.timeout_s)
        self._changed = threading.Condition()
        self._saves = Saves(self._save, changed=self._changed, max_pending=settings.max_pending_saves)
        self._load_thread = ThreadPoolExecutor(1, "kvd-load")
        self._num_loading = 0
        self._received: set[str] = set()
        self._failed: set[int] = set()
        self._failed_now: set[int] = set()
        self._finishing: set[str] = set()
        self._reset, self._reset_done, self._is_resetting = 0, 0, False
        self._resets: Counter[int] = Counter()
        self.num_tokens_loaded = 0
        self.num_tokens_saved = 0

    @property
    def faults(self) -> Counter[str]:
        """What failed, by kind."""
        dropped = Counter({"save no-room": self._saves.num_dropped} if self._saves.num_dropped else {})
        return self._loading.faults + self._saving.faults + dropped

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Takes vLLM's cache, by layer. Where it is not as expected nothing is copied, and the reason logged."""
        try:
            self._slabs = Slabs(self._names.layout, self._block_size, self._layers, caches)
        except EngineUnsupported as error:
            log.warning("kvd stays out of this engine: %s", error)
            return
        # So that the session is older than the first prefill: the daemon believes no report of anything before.
        self._saves.submit(lambda: self._saving.ask("connect", lambda client: None))

    def before_step(self, metadata: StepMetadata) -> None:
        """Before anything of this step is written to vLLM's blocks."""
        if metadata.preempted:
            self._saves.abandon(metadata.preempted)
        if metadata.reset > self._reset:
            self._reset = metadata.reset
            self._saves.abandon()
        with self._changed:
            starts = self._reset > self._reset_done and not self._is_resetting
            self._is_resetting = self._is_resetting or starts
        if starts:
            self._saves.submit(partial(self._flush, self._reset))

    def begin_step(self) -> None:
        """The model computes from now on, until `after_step`."""
        self._began_s = self._clock()

    def start_loads(self, metadata: StepMetadata) -> None:
        """Returns at once."""
        for load in metadata.loads:
            with self._changed:
                self._num_loading += 1
            self._load_thread.submit(self._load, load).add_done_callback(report_defect)

    def after_step(self, metadata: StepMetadata) -> None:
        """The step's tokens are computed: what is full now may be saved."""
        step_s = self._clock() - self._began_s
        self._finishing.update(metadata.finishing)
        # Ranks compute at the same time: the seconds of one are those of all.
        token_s = step_s / metadata.num_tokens if metadata.num_tokens and self._rank == 0 else 0.0
        for save in metadata.saves:
            self._saves.put(replace(save, prefill_s=save.num_prefilled * token_s))
        if not metadata.num_tokens:
            with self._changed:
                if self._num_loading or self._finishing:
                    self._changed.wait_for(lambda: self._received or self._sent(), IDLE_WAIT_S)

    def _sent(self) -> set[str]:
        return {name for name in self._finishing if not self._saves.reads(name)}

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose saves have ended though they are finished, and those whose loads have, well or not."""
        with self._changed:
            sent, received = self._sent(), self._received
            self._finishing -= sent
            self._received = set()
            self._failed_now |= self._failed
            self._failed = set()
        return sent, received

    def take_failed_blocks(self) -> set[int]:
        """Blocks of vLLM's that a load, reported by the last `take_finished`, left without their content."""
        failed, self._failed_now = self._failed_now, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What ended since the last call."""
        with self._changed:
            done = self._saves.take_done()
            resets, self._resets = self._resets, Counter()
        return WorkerReport(done, resets) if done or resets else None

    def _load(self, load: Load) -> None:
        stop = load.first
        try:
            stop = self._loading.ask("load", partial(self._copy_in, load)) or stop
        finally:
            with self._changed:
                self.num_tokens_loaded += stop - load.first
                self._failed.update(load.blocks[(stop - load.first) // self._block_size :])
                self._received.add(load.request)
                self._num_loading -= 1
                self._changed.notify_all()

    def _copy_in(self, load: Load, client: Client) -> int:
        """How many of the load's tokens vLLM has now."""
        slabs = self._require_slabs()
        cache = self._loading.cache(client, self._names.namespace(self._rank, load.variant))
        try:
            sequence = cache.sequence(
                load.tokens,
                len(load.tokens),
                wait_s=self._settings.load_wait_s,
                verify=True,
                populate=False,
                announce=False,
                attach_all=True,
            )
        except CorruptBlock:
            # The block would be found, and refused, again and again.
            self._loading.ask("verify", Client.verify)
            raise
        with sequence:
            stop = sequence.num_cached_tokens
            if stop < len(load.tokens):
                self._loading.faults["load evicted"] += 1
            if stop <= load.first:
                return load.first
            num_blocks = (stop - load.first) // self._block_size
            slabs.copy_in(load.blocks[:num_blocks], sequence.buffer(load.first, stop))
            return stop

    def _save(self, save: Save, may_copy: Callable[[], bool]) -> None:
        self._saving.ask("save", partial(self._copy_out, save, may_copy))

    def _copy_out(self, save: Save, may_copy: Callable[[], bool], client: Client) -> None:
        slabs = self._require_slabs()
        cache = self._saving.cache(client, self._names.namespace(self._rank, save.variant))
        with cache.sequence(
            save.tokens,
            len(save.tokens),
            wait_s=0,
            populate=False,
            announce=False,
            attach_all=True,
            only_stores=True,
        ) as sequence:
            start, stop = sequence.num_cached_tokens, len(save.tokens)
            if start == stop or not may_copy():
                return
            try:
                slabs.copy_out(save.blocks[start // self._block_size :], sequence.buffer(start, stop))
            finally:
                self._saves.copied()
            sequence.advance(stop - start)
            sequence.computed(save.num_prefilled, save.prefill_s)
            sequence.commit()
            self.num_tokens_saved += stop - start

    def _require_slabs(self) -> Slabs:
        if self._slabs is None:
            raise EngineUnsupported("vLLM's cache is not as expected; the log of the start says why")
        return self._slabs

    def _flush(self, number: int) -> None:
        """Forgets what was stored between the scheduler's flush and the end of the saves of then."""
        flushed = self._saving.ask("flush", lambda client: client.flush(model=self._names.model))
        with self._changed:
            self._is_resetting = False
            if flushed is not None:
                self._reset_done = number
                self._resets[number] += 1

    def close(self) -> None:
        """Ends what runs, saves what is queued. Idempotent."""
        self._load_thread.shutdown(wait=True, cancel_futures=True)
        self._saves.close()
        for daemon in (self._loading, self._saving):
            daemon.close()
