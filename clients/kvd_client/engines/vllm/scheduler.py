"""The half of the connector beside vLLM's scheduler: asks how far a prompt is cached, says what to load and to save."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvd.hashing import Namespace
from kvd_client.client import Client
from kvd_client.core.sequence_core import MIN_PREFILL_TOKENS
from kvd_client.engines.vllm.daemon import Daemon
from kvd_client.engines.vllm.identity import Names
from kvd_client.engines.vllm.metadata import Load, Save, StepMetadata, WorkerReport
from kvd_client.engines.vllm.names import Variant, Variants
from kvd_client.engines.vllm.settings import Settings

ANSWER_S = 1.0
"""A request that waits for room is asked about in every step; the daemon is not."""


@dataclass(slots=True)
class _Answer:
    """How far a prompt was cached at a time."""

    num_cached: int
    at_s: float
    first: int = 0
    """Tokens that vLLM had itself when it was told."""


@dataclass(slots=True)
class _Tracked:
    """A request that holds blocks of vLLM."""

    request: Any
    variant: Variant | None
    num_saved: int = 0
    """Tokens that were saved, are being saved, or came from kvd."""
    outstanding: set[int] = field(default_factory=set)
    """Saves that read blocks the request holds now."""
    is_loading: bool = False


class SchedulerSide:
    """Called by vLLM's scheduler, in one thread."""

    def __init__(
        self,
        names: Names,
        settings: Settings,
        *,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_size`: tokens in one of vLLM's blocks."""
        self._names = names
        self._block_size = block_size
        self._step_tokens = names.layout.block_tokens
        self._clock = clock
        self._daemon = Daemon(settings.runtime_dir, label="vllm scheduler", timeout_s=settings.timeout_s, clock=clock)
        self._variants = Variants()
        self._answers: dict[str, _Answer] = {}
        self._tried: dict[str, int] = {}
        """Request -> how often it had been preempted when it was last loaded; one load each, whatever became of it."""
        self._tracked: dict[str, _Tracked] = {}
        self._readers: dict[int, str] = {}
        """Save -> its request, until every rank is done with it."""
        self._done: Counter[int] = Counter()
        self._num_saves = 0
        self._reset, self._reset_done = 0, 0
        self._resets: Counter[int] = Counter()
        self._next = StepMetadata()

    @property
    def faults(self) -> Counter[str]:
        """What the daemon could not answer."""
        return self._daemon.faults

    def num_matched(self, request: Any, num_computed: int) -> int:
        """Tokens beyond `num_computed` that kvd has, in memory or below. Pins nothing."""
        name = request.request_id
        if self._reset > self._reset_done or request.skip_reading_prefix_cache:
            return 0
        if self._tried.get(name, -1) >= request.num_preemptions:
            return 0
        variant = self._variants.of(request)
        # The logits of the last token are wanted, so that one is left to vLLM.
        longest = (request.num_tokens - 1) // self._step_tokens * self._step_tokens
        if variant is None or longest <= num_computed:
            return 0
        answer = self._answers.get(name)
        if answer is None or self._clock() - answer.at_s > ANSWER_S:
            tokens = list(request.all_token_ids[:longest])
            namespace = self._names.namespace(0, variant)
            found = self._daemon.ask("match", partial(self._reach, namespace, tokens))
            answer = self._answers[name] = _Answer(found or 0, self._clock())
        answer.first = num_computed
        return max(0, answer.num_cached - num_computed)

    def _reach(self, namespace: Namespace, tokens: list[int], client: Client) -> int:
        reach = self._daemon.cache(client, namespace).reach(tokens)
        return max([reach.num_resident, *reach.by_tier.values()])

    def allocated(self, request: Any, blocks: list[int], num_external: int) -> None:
        """The scheduler has given a request its blocks; `num_external` tokens behind vLLM's own are to be loaded."""
        name = request.request_id
        answer = self._answers.pop(name, None)
        tracked = self._tracked.get(name)
        if tracked is None:
            tracked = self._tracked[name] = _Tracked(request, self._variants.of(request))
        if not num_external or answer is None or tracked.variant is None:
            return
        stop = answer.first + num_external
        self._tried[name] = request.num_preemptions
        tracked.is_loading = True
        tracked.num_saved = stop
        places = blocks[answer.first // self._block_size : stop // self._block_size]
        load = Load(name, tracked.variant, list(request.all_token_ids[:stop]), answer.first, places)
        self._next.loads.append(load)

    def metadata(self, step: Any) -> StepMetadata:
        """What the workers are to do in this step, a `SchedulerOutput`. Called once for each."""
        metadata, self._next = self._next, StepMetadata()
        metadata.num_tokens = step.total_num_scheduled_tokens
        metadata.reset = self._reset
        for name in step.preempted_req_ids or ():
            metadata.preempted.append(name)
            if name in self._tracked:
                self._tracked[name].num_saved = 0
                self._tracked[name].outstanding.clear()
        for name, num_scheduled in step.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is not None:
                # Ids that were sampled but are not known yet, as with asynchronous scheduling, wait for a later step.
                request = tracked.request
                num_written = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
                resolve = partial(step.kv_connector_block_state.resolve_block_ids, name)
                num_prefilled = num_scheduled if num_scheduled >= MIN_PREFILL_TOKENS else 0
                self._save(metadata, tracked, num_written, resolve, num_prefilled)
        return metadata

    def _save(
        self,
        metadata: StepMetadata,
        tracked: _Tracked,
        num_written: int,
        resolve: Callable[[], Sequence[list[int]]],
        num_prefilled: int = 0,
    ) -> None:
        """`resolve` gives the request's blocks, in a list of its own for each group of layers: there is one."""
        stop = num_written // self._step_tokens * self._step_tokens
        if tracked.variant is None or stop <= tracked.num_saved:
            return
        self._num_saves += 1
        name = tracked.request.request_id
        tokens = list(tracked.request.all_token_ids[:stop])
        blocks = resolve()[0][: stop // self._block_size]
        save = Save(self._num_saves, name, tracked.variant, tokens, blocks, num_prefilled)
        metadata.saves.append(save)
        tracked.num_saved = stop
        tracked.outstanding.add(save.number)
        self._readers[save.number] = name

    def finished(self, request: Any, blocks: list[int]) -> bool:
        """A request has ended; True when its blocks must stay until the workers report it."""
        name = request.request_id
        self._answers.pop(name, None)
        self._tried.pop(name, None)
        tracked = self._tracked.pop(name, None)
        if tracked is None or tracked.is_loading:
            # What is being loaded keeps its blocks in any case, and none of it may be counted as computed.
            return False
        # The last token was sampled, not computed.
        num_written = min(request.num_computed_tokens, request.num_tokens - 1)
        self._save(self._next, tracked, num_written, lambda: [blocks])
        if tracked.outstanding:
            self._next.finishing.append(name)
        return bool(tracked.outstanding)

    def heard(self, output: Any) -> None:
        """Takes in a `KVConnectorOutput` of the workers."""
        for name in output.finished_recving or ():
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.is_loading = False
                # What could not be loaded is computed, and saved then; vLLM has cut the count already.
                tracked.num_saved = min(tracked.num_saved, tracked.request.num_computed_tokens)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for number, count in report.done.items():
                self._done[number] += count
                if self._done[number] >= self._names.num_ranks:
                    self._saved(number)
            for number, count in report.resets.items():
                self._resets[number] += count
                if self._resets[number] >= self._names.num_ranks:
                    self._reset_done = max(self._reset_done, number)

    def _saved(self, number: int) -> None:
        del self._done[number]
        tracked = self._tracked.get(self._readers.pop(number, ""))
        if tracked is not None:
            tracked.outstanding.discard(number)

    def reset(self) -> bool:
        """Has everything of this model's weights forgotten, in memory and every tier below; False when kvd could not.

        Until the workers have let go of what they were saving, and it is forgotten too, nothing is found.
        """
        self._reset += 1
        self._answers.clear()
        return self._daemon.ask("flush", lambda client: client.flush(model=self._names.model)) is not None

    def close(self) -> None:
        """Idempotent."""
        self._daemon.close()
