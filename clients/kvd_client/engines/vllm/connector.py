"""`KvdConnector`: what vLLM calls, in its scheduler's process and in each worker's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvd.errors import EngineUnsupported, InvalidLayout
from kvd_client.engines.vllm.daemon import log
from kvd_client.engines.vllm.identity import Names
from kvd_client.engines.vllm.metadata import StepMetadata, WorkerReport
from kvd_client.engines.vllm.scheduler import SchedulerSide
from kvd_client.engines.vllm.settings import Settings
from kvd_client.engines.vllm.support import require_supported
from kvd_client.engines.vllm.worker import WorkerSide


class KvdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of the connector, by `role`. An engine that cannot be served gets neither: every call does nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `ConfigError` for an unknown setting; what it cannot serve it logs."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self.reason = ""
        """Why the engine is not served; empty when it is."""
        settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        try:
            require_supported(vllm_config, kv_cache_config)
            names = Names(vllm_config, kv_cache_config, model=settings.model)
        except (EngineUnsupported, InvalidLayout) as error:
            self.reason = str(error)
            if role == KVConnectorRole.SCHEDULER:
                log.warning("kvd stays out of this engine: %s", error)
            return
        group = kv_cache_config.kv_cache_groups[0]
        block_size = group.kv_cache_spec.block_size
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(names, settings, block_size=block_size)
            log.info("kvd shares this engine's KV cache: %s, %d tokens a block", names.model, names.layout.block_tokens)
        else:
            self._worker = WorkerSide(
                names,
                settings,
                rank=get_tensor_model_parallel_rank(),
                layers=list(group.layer_names),
                block_size=block_size,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that is dropped is a miss later, no more."""
        return False

    @property
    def faults(self) -> Counter[str]:
        """What kvd could not do, by kind."""
        side = self._scheduler or self._worker
        return side.faults if side is not None else Counter()

    @property
    def num_tokens_loaded(self) -> int:
        """Tokens that came from kvd, on this rank."""
        return self._worker.num_tokens_loaded if self._worker is not None else 0

    @property
    def num_tokens_saved(self) -> int:
        """Tokens that went to kvd, from this rank."""
        return self._worker.num_tokens_saved if self._worker is not None else 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that kvd has beyond vLLM's own, whether they are loaded beside the steps)."""
        num = self._scheduler.num_matched(request, num_computed_tokens) if self._scheduler is not None else 0
        return num, num > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has blocks now."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers are to do in this step."""
        return self._scheduler.metadata(scheduler_output) if self._scheduler is not None else StepMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done."""
        if self._scheduler is not None:
            self._scheduler.heard(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks must stay until the workers have saved them, nothing)."""
        return self._scheduler is not None and self._scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, where vLLM manages several groups of layers; those with more than one are not served."""
        return self.request_finished(request, block_ids[0] if len(block_ids) == 1 else [])

    def reset_cache(self) -> bool | None:
        """Has everything of this model forgotten, in every tier; False when kvd could not."""
        return self._scheduler.reset() if self._scheduler is not None else True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Where vLLM's cache lies, by layer."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before blocks that were taken back are written to."""
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """What this step is to do; the model computes next. (vLLM starts loads before that or after, as it likes.)"""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **_arguments: Any) -> None:
        """Hands the step's loads to their thread."""
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step runs over blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_arguments: Any) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Hands the step's saves to their thread; they read blocks that no later step writes."""
        if self._worker is not None:
            self._worker.after_step(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(finished requests that are saved, requests that are loaded)."""
        if self._worker is None:
            return None, None
        sent, received = self._worker.take_finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM has to compute after all."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler's half is to know."""
        return self._worker.take_report() if self._worker is not None else None

    def shutdown(self) -> None:
        """Saves what is queued and closes the sessions. Idempotent."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        if faults := self.faults:
            log.info("kvd: what failed: %s", dict(faults))
